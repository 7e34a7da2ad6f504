// A libcufile for tests, on top of the fake CUDA driver. XDS_NVIDIA_FS_STATS names the file that stands in for the
// module's counters. FAKE_CUFILE_MODE: "dma" counts each read as the module does; "compat" answers and does not count;
// "wrong" counts and brings other bytes; "short" gives at most 5000 bytes a call; "error" fails with EIO after the first.
#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {
std::mutex mutex;
int64_t reads = 0;

std::string mode() {
    const char* chosen = std::getenv("FAKE_CUFILE_MODE");
    return chosen ? chosen : "compat";
}

void count() {
    FILE* stats = std::fopen(std::getenv("XDS_NVIDIA_FS_STATS"), "w");
    std::fprintf(stats, "GDS Version: 1.0\nReads\t\t: n=%ld ok=%ld err=0\nWrites\t\t: n=9 ok=9\n", reads, reads);
    std::fclose(stats);
}

int to_device(uint64_t address, const void* from, size_t nbytes) {
    static auto* write = reinterpret_cast<int (*)(unsigned long long, const void*, size_t)>(
        dlsym(dlopen(std::getenv("XDS_CUDA_LIBRARY"), RTLD_NOW), "cuMemcpyHtoD_v2"));
    return write(address, from, nbytes);
}

struct Error {
    int error, cuda;
};
struct Description {
    int type;
    union {
        int fd;
        void* handle;
    } handle;
    const void* operations;
};
}  // namespace

API Error cuFileDriverOpen() { return {0, 0}; }
API Error cuFileHandleRegister(void** handle, Description* description) {
    if (description->type != 1) return {5001, 0};
    *handle = reinterpret_cast<void*>(static_cast<intptr_t>(description->handle.fd) + 1);
    return {0, 0};
}
API void cuFileHandleDeregister(void*) {}
API ssize_t cuFileRead(void* handle, void* base, size_t nbytes, off_t offset, off_t at) {
    std::lock_guard lock(mutex);
    if (mode() == "error" && reads > 0) {
        errno = EIO;
        return -1;
    }
    if (mode() == "short" && reads > 0 && nbytes > 5000) nbytes = 5000;
    // The descriptor was opened with O_DIRECT: read through a plain one, as the device would.
    std::string path = "/proc/self/fd/" + std::to_string(reinterpret_cast<intptr_t>(handle) - 1);
    FILE* file = std::fopen(path.c_str(), "rb");
    std::vector<char> bytes(nbytes);
    ssize_t got = pread(fileno(file), bytes.data(), nbytes, offset);
    std::fclose(file);
    if (mode() == "wrong") bytes[0] = static_cast<char>(bytes[0] ^ 1);
    if (mode() != "compat") {
        ++reads;
        count();
    }
    if (got > 0 && to_device(reinterpret_cast<uint64_t>(base) + static_cast<uint64_t>(at), bytes.data(),
                             static_cast<size_t>(got)) != 0) {
        errno = EFAULT;
        return -1;
    }
    return got;
}
