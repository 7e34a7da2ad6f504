// The mover: threads that read chunks of jobs into ring slots and send them on. Layer: native, the top.
//
// Each thread owns a few slots of the ring, a CUDA stream a device, and an io_uring. A slot is free, being read into
// (io_uring) or being copied from (copy engine); reads through the page cache happen in the thread itself.
#pragma once
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "job.h"
#include "uring.h"

namespace xds {

class Mover;

struct Slot {
    enum class State { free, reading, copying };
    State state = State::free;
    char* memory = nullptr;
    bool registered = false;  // with the CUDA driver
    Chunk chunk;
    uint64_t since_ns = 0;
};

// One thread.
class Worker {
  public:
    Worker(Mover& mover, uint32_t index);
    void run();
    void release();  // the thread is gone: free slots, streams, events

  private:
    struct Lane {  // what the thread has on one device
        CUcontext context = nullptr;
        CUstream stream = nullptr;
        std::vector<CUevent> events;  // one a slot
        uint64_t waited_batch = 0;
    };

    Slot* free_slot();
    void progress();
    void pause();
    void start(Slot& slot);
    void prepare(Slot& slot);
    void read_direct(Slot& slot);
    void finish_direct(Slot& slot, int64_t result);
    void read_buffered(Slot& slot);
    void read_cufile(Slot& slot);
    void gather(Slot& slot);
    void write_out(Slot& slot);
    void send(Slot& slot);
    CUresult copy(Slot& slot);
    void fail_system(Slot& slot, int code, uint64_t offset, uint64_t nbytes);
    void fail_short(Slot& slot, uint64_t offset, uint64_t nbytes);
    void fail_cuda(Slot& slot, CUresult code, const char* what);
    void abandon(Slot& slot);
    void finish(Slot& slot);
    void recycle(Slot& slot);
    bool ensure_memory(Slot& slot);
    CUresult ensure_registered(Slot& slot);
    CUresult lane(int device, Lane** lane);
    void open_uring(Job& job);

    Mover& mover_;
    const uint32_t index_;
    std::vector<Slot> slots_;
    std::map<int, Lane> lanes_;
    Uring uring_;
    int uring_error_ = -1;  // -1: not asked yet
    uint32_t reading_ = 0, copying_ = 0, idle_polls_ = 0;
};

class Mover : public std::enable_shared_from_this<Mover> {
  public:
    explicit Mover(const xds_mover_config& config);
    ~Mover() { close(); }

    // Cancels what runs, waits for it, ends the threads, frees the ring. What is asked for afterwards is cancelled.
    // Where a thread hangs in the kernel or in the driver, all that is left to the last such thread to free.
    void close();

    std::shared_ptr<Job> create(std::vector<int> fds, int device, bool out, uint32_t forbid);
    void work_added(const std::shared_ptr<Job>& job);
    void forget(const std::shared_ptr<Job>& job);

    // For the threads.
    const xds_mover_config& config() const { return config_; }
    bool stopping() const { return stopping_.load(std::memory_order_relaxed); }
    bool take(uint32_t index, Chunk* chunk, uint64_t* version);
    void sleep(uint64_t version);
    // The thread's copy stream, made with the device's context current.
    CUresult copy_stream(int device, uint32_t index, CUstream* stream);
    std::atomic<uint64_t> pinned_nbytes{0};

  private:
    std::mutex streams_mutex_;
    std::map<std::pair<int, uint32_t>, CUstream> streams_;  // by device and number
    const xds_mover_config config_;
    Choosers choosers_;
    std::mutex mutex_;
    std::condition_variable work_;
    uint64_t version_ = 0;
    size_t turn_ = 0;
    std::vector<std::shared_ptr<Job>> jobs_;
    std::vector<std::unique_ptr<Worker>> workers_;
    void thread_ended();
    void free_all();
    std::vector<std::thread> threads_;
    std::condition_variable ended_;
    size_t running_ = 0;            // threads that have not ended
    std::shared_ptr<Mover> left_;   // itself, where close left it to its threads
    std::atomic<bool> stopping_{false};
};

}  // namespace xds
