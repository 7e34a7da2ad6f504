// One file of a job: what kind of storage it is on, what it allows, what of it is in the page cache.
// Layer: native, below the job; includes nothing of CUDA.
#pragma once
#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>

namespace xds {

constexpr uint32_t DIRECT_ALIGNMENT = 4096;

enum class Storage { memory, local, network };

class SourceFile {
  public:
    SourceFile(int fd, bool out) : fd_(fd), out_(out) {}
    ~SourceFile();
    SourceFile(const SourceFile&) = delete;
    SourceFile& operator=(const SourceFile&) = delete;

    int fd() const { return fd_; }
    // Asks the file system what it is and what it allows. Blocks for as long as the file system does, so no lock may be
    // held; once, before anything below is asked. `cufile_device` is the CUDA device, or -1 to leave cuFile alone.
    void prepare(int cufile_device);

    // Kind of the file system (statfs magic) and its device number.
    Storage storage() const { return storage_; }
    dev_t device() const { return device_; }
    // A descriptor opened with O_DIRECT, or -1 where that is refused. Requests are aligned to DIRECT_ALIGNMENT in
    // offset, length and address.
    int direct_fd() const { return direct_fd_; }
    // The descriptor's cuFile handle where real DMA to the device was proved, or null.
    void* cufile() const { return cufile_; }
    // nvidia-fs is there, and the proof failed.
    bool cufile_unproved() const { return cufile_unproved_; }

    // Asks with RWF_NOWAIT whether the page at `offset` is resident: 1, 0, or -1 where the kernel cannot say.
    // mincore is not asked: it answers "resident" to whoever may not write the file.
    int resident(uint64_t offset) const;

  private:
    void open_direct();

    const int fd_;
    const bool out_;  // written, not read
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

// The other way: from `iov` into a mapping of the file, which must be long enough. Returns bytes copied; 0 where a page
// could not be had (the file system is full: writing says so); or -errno.
int64_t copy_to_mapping(int fd, uint64_t offset, const iovec* iov, int count);

// Writes with pwritev until all is there. Returns bytes written or -errno; counts as read_fully does.
int64_t write_fully(int fd, uint64_t offset, iovec* iov, int count, uint64_t* commands, uint64_t* retries);

// Reads with preadv until all is there. Returns bytes read (fewer only at end of file) or -errno; adds the requests
// issued to `commands` and the repeated ones to `retries`. `iov` is used up.
int64_t read_fully(int fd, uint64_t offset, iovec* iov, int count, uint64_t* commands, uint64_t* retries);

}  // namespace xds
