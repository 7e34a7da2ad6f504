// cuFile, used only where a test read has proved that bytes went from the device to the GPU by DMA.
// Layer: native, above cuda_driver and source_file.
//
// cuFile answers reads in "compatibility mode" too: an ordinary read and a copy, slower than our own, and it does not
// say so. The proof is the nvidia-fs module's own count of reads: it must have moved during the test read.
// Source: cufile.h of the CUDA toolkit; /proc/driver/nvidia-fs/stats of the module.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace xds {

class CuFile {
  public:
    // One per process; opens libcufile when first asked to prove anything.
    static CuFile& get();
    // Whether the nvidia-fs module is there and counts; without it nothing can be proved.
    static bool module_loaded();

    // Whether reads of `fd`'s file system into `device` were proved to be real DMA; `reason` says why not. The answer
    // is kept for each file system and device.
    bool proved(int fd, int device, std::string* reason);

    // A registered handle for a descriptor opened with O_DIRECT; null where it is refused.
    void* open(int direct_fd);
    void close(void* handle);
    // Bytes read, or -errno.
    int64_t read(void* handle, uint64_t destination, uint64_t nbytes, uint64_t offset);

  private:
    struct Answer {
        bool proved;
        std::string reason;
    };
    Answer prove(int fd, int device);
    bool load(std::string* reason);

    std::mutex mutex_;
    std::map<std::pair<dev_t, int>, Answer> answers_;
    bool asked_ = false;
    bool usable_ = false;
    std::string why_not_;
};

}  // namespace xds
