// io_uring by its three system calls. Layer: native.
#include "uring.h"

#include <linux/io_uring.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

namespace xds {
namespace {

unsigned load_acquire(unsigned* word) { return std::atomic_ref<unsigned>(*word).load(std::memory_order_acquire); }
void store_release(unsigned* word, unsigned value) {
    std::atomic_ref<unsigned>(*word).store(value, std::memory_order_release);
}

}  // namespace

int Uring::open(unsigned entries) {
    io_uring_params params{};
    int fd = static_cast<int>(syscall(SYS_io_uring_setup, entries, &params));
    if (fd < 0) return errno;
    fd_ = fd;
    entries_ = params.sq_entries;
    sq_size_ = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    cq_size_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    sqe_size_ = params.sq_entries * sizeof(io_uring_sqe);
    auto map = [&](size_t size, uint64_t what) {
        return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(what));
    };
    sq_map_ = map(sq_size_, IORING_OFF_SQ_RING);
    cq_map_ = map(cq_size_, IORING_OFF_CQ_RING);
    sqe_map_ = map(sqe_size_, IORING_OFF_SQES);
    if (sq_map_ == MAP_FAILED || cq_map_ == MAP_FAILED || sqe_map_ == MAP_FAILED) {
        int code = errno;
        close();
        return code;
    }
    auto at = [](void* base, unsigned offset) { return reinterpret_cast<unsigned*>(static_cast<char*>(base) + offset); };
    sq_tail_ = at(sq_map_, params.sq_off.tail);
    sq_mask_ = at(sq_map_, params.sq_off.ring_mask);
    sq_array_ = at(sq_map_, params.sq_off.array);
    cq_head_ = at(cq_map_, params.cq_off.head);
    cq_tail_ = at(cq_map_, params.cq_off.tail);
    cq_mask_ = at(cq_map_, params.cq_off.ring_mask);
    cqes_ = at(cq_map_, params.cq_off.cqes);
    sqes_ = sqe_map_;
    return 0;
}

void Uring::close() {
    auto unmap = [](void*& map, size_t size) {
        if (map && map != MAP_FAILED) munmap(map, size);
        map = nullptr;
    };
    unmap(sqe_map_, sqe_size_);
    unmap(cq_map_, cq_size_);
    unmap(sq_map_, sq_size_);
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
    registered_ = false;
}

int Uring::register_buffers(std::span<const iovec> buffers) {
    if (syscall(SYS_io_uring_register, fd_, IORING_REGISTER_BUFFERS, buffers.data(), buffers.size()) < 0) return errno;
    registered_ = true;
    return 0;
}

int Uring::read(int file, void* address, unsigned nbytes, uint64_t offset, unsigned buffer, uint64_t tag) {
    unsigned tail = *sq_tail_;  // we alone write it
    unsigned index = tail & *sq_mask_;
    auto* sqe = static_cast<io_uring_sqe*>(sqes_) + index;
    std::memset(sqe, 0, sizeof *sqe);
    sqe->opcode = registered_ ? IORING_OP_READ_FIXED : IORING_OP_READ;
    sqe->fd = file;
    sqe->addr = reinterpret_cast<uint64_t>(address);
    sqe->len = nbytes;
    sqe->off = offset;
    sqe->buf_index = static_cast<uint16_t>(registered_ ? buffer : 0);
    sqe->user_data = tag;
    sq_array_[index] = index;
    store_release(sq_tail_, tail + 1);
    for (int attempt = 0;; ++attempt) {
        long submitted = syscall(SYS_io_uring_enter, fd_, 1, 0, 0, nullptr, 0);
        if (submitted == 1) return 0;
        bool again = submitted < 0 && (errno == EINTR || errno == EAGAIN || errno == EBUSY);
        if (again && attempt < 10000) {
            sched_yield();
            continue;
        }
        int code = submitted < 0 ? errno : EIO;
        store_release(sq_tail_, tail);  // not consumed: take it back
        return code;
    }
}

void Uring::wait(int64_t timeout_ns) const {
    pollfd ready{fd_, POLLIN, 0};
    timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    ppoll(&ready, 1, &timeout, nullptr);
}

unsigned Uring::reap(const std::function<void(uint64_t, int)>& done) {
    unsigned head = *cq_head_;
    unsigned count = 0;
    while (head != load_acquire(cq_tail_)) {
        const auto* cqe = static_cast<const io_uring_cqe*>(cqes_) + (head & *cq_mask_);
        uint64_t tag = cqe->user_data;
        int result = cqe->res;
        // Published before the callback: it may submit, and the kernel must see room.
        store_release(cq_head_, ++head);
        done(tag, result);
        ++count;
    }
    return count;
}

}  // namespace xds
