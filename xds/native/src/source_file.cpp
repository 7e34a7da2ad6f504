// One file of a job: kind of storage, O_DIRECT, residency, and the two ways to read it through the page cache.
// Layer: native, below the job.
#include "source_file.h"

#include "cufile.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/stat.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

namespace xds {
namespace {

// Magics that linux/magic.h leaves to each file system.
constexpr long CIFS_MAGIC = 0xFF534D42, SMB2_MAGIC = 0xFE534D42, LUSTRE_MAGIC = 0x0BD00BD0, GPFS_MAGIC = 0x47504653,
               BEEGFS_MAGIC = 0x19830326, CEPH_MAGIC = 0x00C36400, RAMFS_MAGIC_ = 0x858458F6,
               HUGETLBFS_MAGIC_ = 0x958458F6, FUSE_MAGIC_ = 0x65735546, V9FS_MAGIC_ = 0x01021997,
               TMPFS_MAGIC_ = 0x01021994, NFS_MAGIC_ = 0x6969, AFS_MAGIC_ = 0x5346414F, CODA_MAGIC_ = 0x73757245;

Storage classify(long magic) {
    switch (static_cast<uint32_t>(magic)) {
        case static_cast<uint32_t>(TMPFS_MAGIC_):
        case static_cast<uint32_t>(RAMFS_MAGIC_):
        case static_cast<uint32_t>(HUGETLBFS_MAGIC_):
            return Storage::memory;
        case static_cast<uint32_t>(NFS_MAGIC_):
        case static_cast<uint32_t>(CIFS_MAGIC):
        case static_cast<uint32_t>(SMB2_MAGIC):
        case static_cast<uint32_t>(LUSTRE_MAGIC):
        case static_cast<uint32_t>(GPFS_MAGIC):
        case static_cast<uint32_t>(BEEGFS_MAGIC):
        case static_cast<uint32_t>(CEPH_MAGIC):
        case static_cast<uint32_t>(FUSE_MAGIC_):
        case static_cast<uint32_t>(V9FS_MAGIC_):
        case static_cast<uint32_t>(AFS_MAGIC_):
        case static_cast<uint32_t>(CODA_MAGIC_):
            return Storage::network;
        default:
            return Storage::local;
    }
}

// Older linux/stat.h lacks the direct-I/O fields; the layout is the kernel's (statx(2)).
struct StatxDirect {
    uint32_t mask;
    uint8_t before[152 - 4];
    uint32_t dio_mem_align, dio_offset_align;
    uint8_t after[256 - 160];
};
static_assert(sizeof(StatxDirect) == 256);
constexpr uint32_t STATX_DIOALIGN_ = 0x2000;

// The guard of a mapped copy: a SIGBUS inside the copied range jumps back to the copying thread.
thread_local sigjmp_buf* guard_jump = nullptr;
thread_local const char *guard_begin = nullptr, *guard_end = nullptr;
struct sigaction previous_action;

void on_bus_error(int number, siginfo_t* info, void* context) {
    auto* address = static_cast<const char*>(info->si_addr);
    if (guard_jump && address >= guard_begin && address < guard_end) siglongjmp(*guard_jump, 1);
    // Not ours: whoever was there before us answers.
    if (previous_action.sa_flags & SA_SIGINFO) {
        previous_action.sa_sigaction(number, info, context);
    } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
        previous_action.sa_handler(number);
    } else {
        signal(number, SIG_DFL);
        raise(number);
    }
}

void install_guard() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action {};
        action.sa_sigaction = on_bus_error;
        action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        sigaction(SIGBUS, &action, &previous_action);
    });
}

__attribute__((noinline)) void copy_out(const char* from, const iovec* iov, int count) {
    for (int i = 0; i < count; ++i) {
        std::memcpy(iov[i].iov_base, from, iov[i].iov_len);
        from += iov[i].iov_len;
    }
}

__attribute__((noinline)) void copy_in(char* to, const iovec* iov, int count) {
    for (int i = 0; i < count; ++i) {
        std::memcpy(to, iov[i].iov_base, iov[i].iov_len);
        to += iov[i].iov_len;
    }
}

// Copies out of a mapping or into it; false where a page was not there. Kept apart: nothing with a destructor may live
// here.
__attribute__((noinline)) bool guarded_copy(char* mapping, size_t mapped, const iovec* iov, int count, bool out) {
    sigjmp_buf jump;
    guard_begin = mapping;
    guard_end = mapping + mapped;
    if (sigsetjmp(jump, 0)) {
        guard_jump = nullptr;
        return false;
    }
    guard_jump = &jump;
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (out)
        copy_in(mapping, iov, count);
    else
        copy_out(mapping, iov, count);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    guard_jump = nullptr;
    return true;
}

void advance(iovec*& iov, int& count, size_t nbytes) {
    while (count > 0 && nbytes >= iov->iov_len) {
        nbytes -= iov->iov_len;
        ++iov;
        --count;
    }
    if (count > 0) {
        iov->iov_base = static_cast<char*>(iov->iov_base) + nbytes;
        iov->iov_len -= nbytes;
    }
}

}  // namespace

SourceFile::~SourceFile() {
    if (cufile_) CuFile::get().close(cufile_);
    if (direct_fd_ >= 0) ::close(direct_fd_);
}

void SourceFile::prepare(int cufile_device) {
    struct statfs fs {};
    if (fstatfs(fd_, &fs) == 0) storage_ = classify(static_cast<long>(fs.f_type));
    struct stat status {};
    if (fstat(fd_, &status) == 0) device_ = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
    // A device node lies on devtmpfs, but its bytes do not.
    if (S_ISBLK(status.st_mode)) storage_ = Storage::local;
    if (storage_ != Storage::local) return;
    open_direct();
    if (cufile_device < 0 || direct_fd_ < 0 || !CuFile::module_loaded()) return;
    std::string reason;
    if (CuFile::get().proved(fd_, cufile_device, &reason))
        cufile_ = CuFile::get().open(direct_fd_);
    else
        cufile_unproved_ = true;
}

void SourceFile::open_direct() {
    // Through the descriptor, so that it is the same file whatever the path names by now.
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd_);
    direct_fd_ = ::open(path, (out_ ? O_WRONLY : O_RDONLY) | O_DIRECT | O_CLOEXEC);
    if (direct_fd_ < 0) return;
    StatxDirect status{};
    if (syscall(SYS_statx, fd_, "", AT_EMPTY_PATH, STATX_DIOALIGN_, &status) != 0 || !(status.mask & STATX_DIOALIGN_))
        return;
    // 0: the file system does not do it on this file. Ring slots and requests are aligned to 4096; a file system that
    // wants more is read buffered.
    uint32_t wanted = std::max(status.dio_offset_align, status.dio_mem_align);
    if (status.dio_offset_align == 0 || wanted > DIRECT_ALIGNMENT) {
        ::close(direct_fd_);
        direct_fd_ = -1;
    }
}

int SourceFile::resident(uint64_t offset) const {
    char byte;
    iovec iov{&byte, 1};
    for (;;) {
        ssize_t got = preadv2(fd_, &iov, 1, static_cast<off_t>(offset), RWF_NOWAIT);
        if (got >= 0) return 1;
        if (errno == EINTR) continue;
        return errno == EAGAIN ? 0 : -1;
    }
}

int64_t copy_mapped(int fd, uint64_t offset, const iovec* iov, int count) {
    install_guard();
    static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    uint64_t nbytes = 0;
    for (int i = 0; i < count; ++i) nbytes += iov[i].iov_len;
    uint64_t begin = offset / page * page;
    auto length = static_cast<size_t>(offset + nbytes - begin);
    void* map = mmap(nullptr, length, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(begin));
    if (map == MAP_FAILED) return -errno;
    // The kernel fills the last page of a mapping with zeros past the end of file: the size is asked for as well.
    struct stat status {};
    bool whole = fstat(fd, &status) == 0 &&
                 (!S_ISREG(status.st_mode) || static_cast<uint64_t>(status.st_size) >= offset + nbytes);
    if (whole)
        whole = guarded_copy(static_cast<char*>(map) + (offset - begin), nbytes, iov, count, false);
    // Cut while it was copied: the zeros of the last page may be among the bytes.
    if (whole && fstat(fd, &status) == 0 && S_ISREG(status.st_mode))
        whole = static_cast<uint64_t>(status.st_size) >= offset + nbytes;
    munmap(map, length);
    return whole ? static_cast<int64_t>(nbytes) : 0;
}

int64_t copy_to_mapping(int fd, uint64_t offset, const iovec* iov, int count) {
    install_guard();
    static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    uint64_t nbytes = 0;
    for (int i = 0; i < count; ++i) nbytes += iov[i].iov_len;
    uint64_t begin = offset / page * page;
    auto length = static_cast<size_t>(offset + nbytes - begin);
    void* map = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(begin));
    if (map == MAP_FAILED) return -errno;
    bool whole = guarded_copy(static_cast<char*>(map) + (offset - begin), nbytes, iov, count, true);
    munmap(map, length);
    return whole ? static_cast<int64_t>(nbytes) : 0;
}

namespace {

// preadv or pwritev until all is done. Returns bytes moved (fewer only where a call moves none) or -errno.
int64_t move_fully(decltype(&preadv) move, int fd, uint64_t offset, iovec* iov, int count, uint64_t* commands,
                   uint64_t* retries) {
    constexpr int IOV_LIMIT = 1024;
    int64_t total = 0;
    while (count > 0 && iov->iov_len == 0) {
        ++iov;
        --count;
    }
    while (count > 0) {
        ssize_t got = move(fd, iov, std::min(count, IOV_LIMIT), static_cast<off_t>(offset));
        ++*commands;
        if (got < 0) {
            if (errno == EINTR) {
                ++*retries;
                continue;
            }
            return -errno;
        }
        if (got == 0) return total;
        total += got;
        offset += static_cast<uint64_t>(got);
        advance(iov, count, static_cast<size_t>(got));
        if (count > 0 && got % 4096 != 0) ++*retries;
    }
    return total;
}

}  // namespace

int64_t read_fully(int fd, uint64_t offset, iovec* iov, int count, uint64_t* commands, uint64_t* retries) {
    return move_fully(preadv, fd, offset, iov, count, commands, retries);
}

int64_t write_fully(int fd, uint64_t offset, iovec* iov, int count, uint64_t* commands, uint64_t* retries) {
    return move_fully(pwritev, fd, offset, iov, count, commands, retries);
}

}  // namespace xds
