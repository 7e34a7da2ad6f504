// io_uring by its three system calls: submit reads, reap completions. Layer: native; includes nothing of ours.
//
// Source: linux/io_uring.h; io_uring(7) for the ordering of ring heads and tails.
#pragma once
#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <span>

namespace xds {

class Uring {
  public:
    Uring() = default;
    ~Uring() { close(); }
    Uring(const Uring&) = delete;
    Uring& operator=(const Uring&) = delete;

    // 0, or the errno that says why it cannot be had (ENOSYS, EPERM: denied by policy).
    int open(unsigned entries);
    void close();
    bool is_open() const { return fd_ >= 0; }
    // 0 or an errno; the buffers stay pinned until close.
    int register_buffers(std::span<const iovec> buffers);
    bool registered() const { return registered_; }

    // Hands one read to the kernel. `buffer` is the index of the registered buffer that holds `address`.
    int read(int file, void* address, unsigned nbytes, uint64_t offset, unsigned buffer, uint64_t tag);
    // Waits up to `timeout_ns` for a completion to be there.
    void wait(int64_t timeout_ns) const;
    // Calls `done(tag, result)` for each completion there is; returns how many.
    unsigned reap(const std::function<void(uint64_t, int)>& done);

  private:
    int fd_ = -1;
    bool registered_ = false;
    unsigned entries_ = 0;
    void *sq_map_ = nullptr, *cq_map_ = nullptr, *sqe_map_ = nullptr;
    size_t sq_size_ = 0, cq_size_ = 0, sqe_size_ = 0;
    unsigned *sq_tail_ = nullptr, *sq_mask_ = nullptr, *sq_array_ = nullptr;
    unsigned *cq_head_ = nullptr, *cq_tail_ = nullptr, *cq_mask_ = nullptr;
    void *sqes_ = nullptr, *cqes_ = nullptr;
};

}  // namespace xds
