// cuFile, used only where a test read has proved real DMA. Layer: native, above cuda_driver and source_file.
#include "cufile.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include "abi.h"
#include "cuda_driver.h"

namespace xds {
namespace {

struct CuFileError {  // CUfileError_t
    int error;
    int cuda;
};

struct CuFileDescription {  // CUfileDescr_t
    int type;
    union {
        int fd;
        void* handle;
    } handle;
    const void* operations;
};

constexpr int HANDLE_TYPE_OPAQUE_FD = 1;
constexpr uint64_t TEST_NBYTES = 64 << 10;

CuFileError (*driver_open)();
CuFileError (*handle_register)(void**, CuFileDescription*);
void (*handle_deregister)(void*);
ssize_t (*file_read)(void*, void*, size_t, off_t, off_t);

const char* stats_path() {
    const char* chosen = std::getenv("XDS_NVIDIA_FS_STATS");
    return chosen && *chosen ? chosen : "/proc/driver/nvidia-fs/stats";
}

// Reads the nvidia-fs module has done so far: the "n=" of the line "Reads : n=... ok=... err=...". -1: not said.
int64_t module_reads() {
    std::ifstream stats(stats_path());
    std::string line;
    while (std::getline(stats, line)) {
        size_t at = line.find("n=");
        if (line.rfind("Reads", 0) == 0 && at != std::string::npos) return std::atoll(line.c_str() + at + 2);
    }
    return -1;
}

}  // namespace

CuFile& CuFile::get() {
    static auto* made = new CuFile;  // never destroyed: libcufile has its own exit handlers
    return *made;
}

bool CuFile::module_loaded() { return module_reads() >= 0; }

bool CuFile::load(std::string* reason) {
    if (!asked_) {
        asked_ = true;
        const char* chosen = std::getenv("XDS_CUFILE_LIBRARY");
        void* library = dlopen(chosen && *chosen ? chosen : "libcufile.so.0", RTLD_NOW | RTLD_LOCAL);
        auto bind = [&](auto& slot, const char* name) {
            slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(library ? dlsym(library, name) : nullptr);
            return slot != nullptr;
        };
        if (!library) {
            const char* why = dlerror();
            why_not_ = why ? why : "libcufile cannot be opened";
        } else if (!bind(driver_open, "cuFileDriverOpen") || !bind(handle_register, "cuFileHandleRegister") ||
                   !bind(handle_deregister, "cuFileHandleDeregister") || !bind(file_read, "cuFileRead")) {
            why_not_ = "libcufile lacks a function";
        } else if (int code = driver_open().error; code != 0) {
            why_not_ = "cuFileDriverOpen answered " + std::to_string(code);
        } else {
            usable_ = true;
        }
    }
    if (!usable_) *reason = why_not_;
    return usable_;
}

bool CuFile::proved(int fd, int device, std::string* reason) {
    struct stat status {};
    if (fstat(fd, &status) != 0) return false;
    std::lock_guard lock(mutex_);
    auto [found, fresh] = answers_.try_emplace({status.st_dev, device});
    if (fresh) found->second = prove(fd, device);
    *reason = found->second.reason;
    return found->second.proved;
}

CuFile::Answer CuFile::prove(int fd, int device) {
    // Without the module there is nothing to prove, and libcufile need not even be opened.
    if (module_reads() < 0)
        return {false, std::string(stats_path()) + " does not count reads: nvidia-fs is not loaded"};
    std::string reason;
    const CudaDriver* cuda = CudaDriver::get(&reason);
    if (!cuda || !load(&reason)) return {false, reason};
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int direct = ::open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (direct < 0) return {false, std::string("O_DIRECT: ") + std::strerror(errno)};
    ContextScope scope(*cuda, device);
    CUdeviceptr buffer = 0;
    Answer answer{false, "the GPU has no memory for the test read"};
    void* handle = nullptr;
    if (scope.code() == CUDA_SUCCESS && cuda->MemAlloc(&buffer, TEST_NBYTES) == CUDA_SUCCESS) {
        handle = open(direct);
        std::vector<char> expected(TEST_NBYTES), got(TEST_NBYTES);
        ssize_t size = pread(fd, expected.data(), TEST_NBYTES, 0);
        int64_t before = module_reads();
        if (!handle) {
            answer.reason = "cuFileHandleRegister refused the file";
        } else if (size < 4096) {
            answer.reason = "the file is too small for a test read";
        } else if (int64_t read_ = read(handle, buffer, static_cast<uint64_t>(size), 0); read_ != size) {
            answer.reason = "the test read gave " + std::to_string(read_) + " of " + std::to_string(size) + " bytes";
        } else if (module_reads() <= before) {
            answer.reason = "the test read was not counted by nvidia-fs: compatibility mode";
        } else if (cuda->MemcpyDtoH(got.data(), buffer, static_cast<size_t>(size)) != CUDA_SUCCESS ||
                   std::memcmp(got.data(), expected.data(), static_cast<size_t>(size)) != 0) {
            answer.reason = "the test read brought other bytes than the file has";
        } else {
            answer = {true, "the test read was counted by nvidia-fs"};
        }
    }
    if (handle) close(handle);
    if (buffer) cuda->MemFree(buffer);
    ::close(direct);
    return answer;
}

void* CuFile::open(int direct_fd) {
    CuFileDescription description{};
    description.type = HANDLE_TYPE_OPAQUE_FD;
    description.handle.fd = direct_fd;
    void* handle = nullptr;
    return handle_register(&handle, &description).error == 0 ? handle : nullptr;
}

void CuFile::close(void* handle) { handle_deregister(handle); }

int64_t CuFile::read(void* handle, uint64_t destination, uint64_t nbytes, uint64_t offset) {
    ssize_t got =
        file_read(handle, reinterpret_cast<void*>(destination), nbytes, static_cast<off_t>(offset), 0);
    // -1: errno says; below: a cuFile code, which is no errno.
    return got >= 0 ? got : got == -1 ? -errno : -EIO;
}

}  // namespace xds

// Whether reads of the file's file system into `device` are real DMA: 1 or 0, with the reason.
XDS_API int32_t xds_cufile_proved(int32_t fd, int32_t device, char* text, size_t size) {
    std::string reason;
    bool proved = xds::CuFile::get().proved(fd, device, &reason);
    std::snprintf(text, size, "%s", reason.c_str());
    return proved;
}
