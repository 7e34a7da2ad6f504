// Storage that misbehaves on demand: a library for LD_PRELOAD that stands before the reads of one file.
//
// It acts on descriptors whose path ends with FAULTY_PATH; all else goes straight through. Environment, read at each
// call:
//   FAULTY_COLD=1        preadv2(RWF_NOWAIT) answers EAGAIN: nothing is in the page cache
//   FAULTY_NOWAIT=errno  preadv2(RWF_NOWAIT) answers so
//   FAULTY_FAIL=n:errno  the first n reads answer so (EINTR, EAGAIN)
//   FAULTY_SHORT=n       no read gives more than n bytes
//   FAULTY_AT=o:errno    a read that covers the offset o answers so
//   FAULTY_DIRECT=errno  a read of a descriptor with O_DIRECT answers so
//   FAULTY_SLOW_US=n     each read takes n microseconds longer
//   FAULTY_HANG=path     each read hangs for as long as there is this file
//   FAULTY_STATFS=path   fstatfs of the file hangs for as long as there is this file (a dead network file system)
//   FAULTY_MAGIC=n       fstatfs of the file names this kind of file system (statfs(2): 26985 is NFS)
//   FAULTY_MMAP=errno    mmap of the file answers so
//   FAULTY_THREADS=n     pthread_create answers EAGAIN from the (n + 1)th thread on
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<long> failed{0}, threads{0};

template <typename F>
F* next(const char* name) {
    return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

long number(const char* name, long otherwise = 0) {
    const char* text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

// "first:second", or false.
bool pair(const char* name, long* first, long* second) {
    const char* text = getenv(name);
    return text && sscanf(text, "%ld:%ld", first, second) == 2;
}

bool chosen(int fd) {
    const char* suffix = getenv("FAULTY_PATH");
    if (!suffix || !*suffix) return false;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    auto wanted = static_cast<ssize_t>(strlen(suffix));
    return length >= wanted && memcmp(path + length - wanted, suffix, static_cast<size_t>(wanted)) == 0;
}

// What goes wrong before the read: an errno, or 0.
int fault(int fd, off_t offset, size_t nbytes) {
    const char* hang = getenv("FAULTY_HANG");
    while (hang && *hang && access(hang, F_OK) == 0) usleep(5000);
    if (long us = number("FAULTY_SLOW_US")) usleep(static_cast<useconds_t>(us));
    long count, code;
    if (pair("FAULTY_FAIL", &count, &code) && failed++ < count) return static_cast<int>(code);
    if (pair("FAULTY_AT", &count, &code) && offset <= count && count < offset + static_cast<long>(nbytes))
        return static_cast<int>(code);
    if (long direct = number("FAULTY_DIRECT"))
        if (fcntl(fd, F_GETFL) & O_DIRECT) return static_cast<int>(direct);
    return 0;
}

size_t limit(size_t nbytes) { return std::min<size_t>(nbytes, static_cast<size_t>(number("FAULTY_SHORT", 1L << 62))); }

ssize_t read_vector(int fd, const iovec* iov, int count, off_t offset) {
    auto real = next<ssize_t(int, const iovec*, int, off_t)>("preadv");
    if (!chosen(fd)) return real(fd, iov, count, offset);
    size_t nbytes = 0;
    for (int i = 0; i < count; ++i) nbytes += iov[i].iov_len;
    if (int code = fault(fd, offset, nbytes)) {
        errno = code;
        return -1;
    }
    if (limit(nbytes) == nbytes) return real(fd, iov, count, offset);
    iovec first{iov[0].iov_base, limit(iov[0].iov_len)};
    return real(fd, &first, 1, offset);
}

ssize_t read_one(int fd, void* to, size_t nbytes, off_t offset) {
    auto real = next<ssize_t(int, void*, size_t, off_t)>("pread");
    if (!chosen(fd)) return real(fd, to, nbytes, offset);
    if (int code = fault(fd, offset, nbytes)) {
        errno = code;
        return -1;
    }
    return real(fd, to, limit(nbytes), offset);
}

}  // namespace

extern "C" {

ssize_t preadv(int fd, const iovec* iov, int count, off_t offset) { return read_vector(fd, iov, count, offset); }
ssize_t preadv64(int fd, const iovec* iov, int count, off_t offset) { return read_vector(fd, iov, count, offset); }
ssize_t pread(int fd, void* to, size_t nbytes, off_t offset) { return read_one(fd, to, nbytes, offset); }
ssize_t pread64(int fd, void* to, size_t nbytes, off_t offset) { return read_one(fd, to, nbytes, offset); }

ssize_t preadv2(int fd, const iovec* iov, int count, off_t offset, int flags) {
    if ((flags & RWF_NOWAIT) && chosen(fd)) {
        long code = number("FAULTY_COLD") ? EAGAIN : number("FAULTY_NOWAIT");
        if (code) {
            errno = static_cast<int>(code);
            return -1;
        }
    }
    return next<ssize_t(int, const iovec*, int, off_t, int)>("preadv2")(fd, iov, count, offset, flags);
}

int fstatfs(int fd, struct statfs* status) {
    const char* hang = getenv("FAULTY_STATFS");
    while (hang && *hang && chosen(fd) && access(hang, F_OK) == 0) usleep(5000);
    int code = next<int(int, struct statfs*)>("fstatfs")(fd, status);
    if (long magic = number("FAULTY_MAGIC"); magic && chosen(fd)) status->f_type = magic;
    return code;
}

void* mmap(void* address, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    long code = fd >= 0 ? number("FAULTY_MMAP") : 0;
    if (code && chosen(fd)) {
        errno = static_cast<int>(code);
        return MAP_FAILED;
    }
    return next<void*(void*, size_t, int, int, int, off_t)>("mmap")(address, nbytes, protection, flags, fd, offset);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*), void* argument) {
    long most = number("FAULTY_THREADS", -1);
    if (most >= 0 && threads++ >= most) return EAGAIN;
    return next<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create")(thread, attributes,
                                                                                                  function, argument);
}
}
