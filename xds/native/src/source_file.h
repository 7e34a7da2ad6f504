// One file of a job: what kind of storage it is on, what it allows, what of it is in the page cache.
// Layer: native, below the job; includes nothing of CUDA.
#pragma once
#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <mutex>

namespace xds {

constexpr uint32_t DIRECT_ALIGNMENT = 4096;

enum class Storage { memory, local, network };

class SourceFile {
  public:
    explicit SourceFile(int fd) : fd_(fd) {}
    ~SourceFile();
    SourceFile(const SourceFile&) = delete;
    SourceFile& operator=(const SourceFile&) = delete;

    int fd() const { return fd_; }
    // Kind of the file system (statfs magic) and its device number; looked up once.
    Storage storage();
    dev_t device();

    // A descriptor opened with O_DIRECT, or -1 where that is refused; opened once. Requests are aligned to
    // DIRECT_ALIGNMENT in offset, length and address.
    int direct_fd();

    // The descriptor's cuFile handle for a device where real DMA was proved, or null; made once. `unproved` says that
    // nvidia-fs is there and the proof failed.
    void* cufile(int device, bool* unproved);

    // Asks with RWF_NOWAIT whether the page at `offset` is resident: 1, 0, or -1 where the kernel cannot say.
    // mincore is not asked: it answers "resident" to whoever may not write the file.
    int resident(uint64_t offset) const;

  private:
    void look();

    const int fd_;
    std::once_flag looked_, opened_, cufile_asked_;
    Storage storage_ = Storage::local;
    dev_t device_ = 0;
    int direct_fd_ = -1;
    void* cufile_ = nullptr;
    bool cufile_unproved_ = false;
};

// Copies `nbytes` of the file at `offset` through a mapping, `iov` by `iov`.
// Returns bytes copied: fewer where the file ends early; or -errno where it cannot be mapped.
// A page that vanishes under the copy (a file cut short) is an early end, not a SIGBUS.
int64_t copy_mapped(int fd, uint64_t offset, const iovec* iov, int count);

// Reads with preadv until all is there. Returns bytes read (fewer only at end of file) or -errno; adds the requests
// issued to `commands` and the repeated ones to `retries`. `iov` is used up.
int64_t read_fully(int fd, uint64_t offset, iovec* iov, int count, uint64_t* commands, uint64_t* retries);

}  // namespace xds
