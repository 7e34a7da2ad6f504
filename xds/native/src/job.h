// One transfer: batches of segments cut into chunks, and the account of what has landed.
// Layer: native, above source_file and chooser, below the mover.
#pragma once
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "chooser.h"
#include "cuda_driver.h"
#include "source_file.h"

namespace xds {

// Part of a chunk: file bytes and where they are read to (an offset in the slot, or for host arrays an address).
struct Piece {
    uint64_t offset, nbytes, position;
};

// Slot bytes and the destination they are copied to.
struct Copy {
    uint64_t slot_offset, destination, nbytes;
};

struct Batch {
    std::vector<xds_segment> segments;
    uint64_t nbytes = 0, landed = 0;
    uint64_t number = 0;      // in the job
    uint64_t serial = 0;      // unique in the process
    CUevent after = nullptr;  // copies wait for it: work on the caller's stream before the read
};

class Job;

// What a thread reads at one go into one slot, of one file and one batch.
struct Chunk {
    std::shared_ptr<Job> job;
    Batch* batch = nullptr;
    uint32_t file = 0;
    xds_method method = XDS_PREAD;
    bool prepare = false;          // not a read yet: the file is to be asked what it is (SourceFile::prepare)
    bool direct = false;           // read [read_offset, read_offset + read_nbytes), aligned; pieces are not used
    uint64_t read_offset = 0, read_nbytes = 0, needed_nbytes = 0;
    uint64_t nbytes = 0;           // payload
    std::vector<Piece> pieces;
    std::vector<Copy> copies;
};

// What the mover lets a job use.
struct Limits {
    uint32_t threads, cpu_threads, forbid;
    uint64_t slot_nbytes, in_flight_nbytes;
};

class Job : public std::enable_shared_from_this<Job> {
  public:
    // `out`: the segments' memory is written to the files, which are open for it and long enough.
    Job(std::vector<int> fds, int device, bool out, Limits limits, Choosers& choosers);
    ~Job();

    int device() const { return device_; }
    // Whether the memory is a GPU's.
    bool to_gpu() const { return device_ >= 0; }
    bool out() const { return out_; }
    ResidentChooser& resident_chooser(uint32_t file) {
        return choosers_.resident(files_[file]->device(), to_gpu(), out_);
    }
    SourceFile& file(uint32_t index) { return *files_[index]; }
    const Limits& limits() const { return limits_; }

    // Batch number, or a negative xds_status (`code` then is the errno or CUresult).
    int64_t add(const xds_segment* segments, uint64_t count, bool ordered, CUstream stream, int32_t* code);
    void seal();
    // Cuts the next chunk for the thread `index`; false where there is none for it.
    bool take(uint32_t index, Chunk* chunk);
    void prepared(const Chunk& chunk);
    void landed(const Chunk& chunk);
    // A chunk that did not land; the first failure is the job's.
    void failed(const Chunk& chunk, xds_status status, int code, uint64_t offset, uint64_t nbytes, std::string text);
    void cancel();
    // Fails with an errno: there is nobody to carry it out.
    void refuse(int code);

    // A descriptor (eventfd) that becomes readable when the job is over: all has landed, or it failed and nothing is in
    // flight. It stays the job's. -errno where none can be had.
    int event_fd();
    xds_status wait(int64_t timeout_ns);
    xds_status next_ready(int64_t timeout_ns, uint64_t* batch);
    bool drained();
    bool stopped();
    bool exhausted();  // no chunk will ever come again
    void failure(xds_failure* out);
    void counters(xds_counters* out);
    uint64_t unread_nbytes();

    // Counters that threads add to.
    void count(const Chunk& chunk, uint64_t commands, uint64_t retries, uint64_t read_ns);
    void count_copy(uint64_t ns);
    void count_setup(uint64_t ns);
    void note(uint64_t bits);
    void refuse_direct(uint32_t file);
    void refuse_uring();

  private:
    enum class Kind { resident, cold, network };
    void decide();
    void build_out(Chunk* chunk);
    void build_buffered(Chunk* chunk);
    void build_direct(Chunk* chunk);
    void skip_finished();
    void consume(uint64_t nbytes);
    void stop_locked(xds_status status);
    bool over_locked() const {
        return in_flight_ == 0 && (stopped_ || (sealed_ && counters_.landed_nbytes == total_nbytes_));
    }
    void changed_locked();

    const int device_;
    const bool out_;
    const Limits limits_;
    Choosers& choosers_;
    std::vector<std::unique_ptr<SourceFile>> files_;
    enum class Stage : char { fresh, preparing, ready };
    std::vector<Stage> stages_;  // one a file
    std::vector<char> direct_refused_;
    bool uring_refused_ = false;

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Batch> batches_;  // a deque: batches stay where they are
    size_t batch_ = 0, segment_ = 0;
    uint64_t consumed_ = 0;  // of the current segment
    size_t decided_batch_ = SIZE_MAX;
    uint32_t decided_file_ = UINT32_MAX;
    Kind kind_ = Kind::resident;
    std::deque<uint64_t> ready_;
    size_t handed_ready_ = 0;
    uint64_t total_nbytes_ = 0;
    uint32_t in_flight_ = 0;
    bool sealed_ = false;
    bool stopped_ = false;
    int event_fd_ = -1;
    xds_failure failure_{};
    xds_counters counters_{};
    uint64_t thread_mask_ = 0;
    uint64_t random_;
};

}  // namespace xds
