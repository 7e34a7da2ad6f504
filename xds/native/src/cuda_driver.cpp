// The CUDA driver, opened with dlopen, and its part of the C ABI. Layer: native, below the ring.
#include "cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "abi.h"

namespace xds {
namespace {

struct Loaded {
    CudaDriver driver{};
    bool usable = false;
    std::string reason;
};

Loaded load() {
    Loaded loaded;
    // A test puts its own driver here; a machine with several drivers may have to choose.
    const char* chosen = std::getenv("XDS_CUDA_LIBRARY");
    const char* name = chosen && *chosen ? chosen : "libcuda.so.1";
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char* why = dlerror();
        loaded.reason = why ? why : "dlopen failed";
        return loaded;
    }
    CudaDriver& d = loaded.driver;
    bool complete = true;
    auto bind = [&](auto& slot, const char* symbol) {
        slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(library, symbol));
        if (!slot) {
            complete = false;
            loaded.reason = std::string(name) + " lacks " + symbol;
        }
    };
    bind(d.Init, "cuInit");
    bind(d.DriverGetVersion, "cuDriverGetVersion");
    bind(d.DeviceGetCount, "cuDeviceGetCount");
    bind(d.DeviceGet, "cuDeviceGet");
    bind(d.DeviceGetName, "cuDeviceGetName");
    bind(d.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    bind(d.CtxPushCurrent, "cuCtxPushCurrent_v2");
    bind(d.CtxPopCurrent, "cuCtxPopCurrent_v2");
    bind(d.CtxSetCurrent, "cuCtxSetCurrent");
    bind(d.StreamCreate, "cuStreamCreate");
    bind(d.StreamDestroy, "cuStreamDestroy_v2");
    bind(d.StreamWaitEvent, "cuStreamWaitEvent");
    bind(d.EventCreate, "cuEventCreate");
    bind(d.EventDestroy, "cuEventDestroy_v2");
    bind(d.EventRecord, "cuEventRecord");
    bind(d.EventQuery, "cuEventQuery");
    bind(d.MemHostRegister, "cuMemHostRegister_v2");
    bind(d.MemHostUnregister, "cuMemHostUnregister");
    bind(d.MemAlloc, "cuMemAlloc_v2");
    bind(d.MemFree, "cuMemFree_v2");
    bind(d.MemcpyDtoH, "cuMemcpyDtoH_v2");
    bind(d.MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
    bind(d.MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
    bind(d.MemGetInfo, "cuMemGetInfo_v2");
    bind(d.PointerGetAttribute, "cuPointerGetAttribute");
    bind(d.GetErrorName, "cuGetErrorName");
    bind(d.GetErrorString, "cuGetErrorString");
    if (!complete) return loaded;
    CUresult code = d.Init(0);
    int count = 0;
    if (code == CUDA_SUCCESS) code = d.DeviceGetCount(&count);
    if (code != CUDA_SUCCESS) {
        loaded.reason = "cuInit: " + d.describe(code);
    } else if (count == 0) {
        loaded.reason = "the CUDA driver sees no device";
    } else {
        loaded.usable = true;
    }
    return loaded;
}

}  // namespace

const CudaDriver* CudaDriver::get(std::string* reason) {
    static const Loaded loaded = load();
    if (!loaded.usable && reason) *reason = loaded.reason;
    return loaded.usable ? &loaded.driver : nullptr;
}

CUresult CudaDriver::primary_context(int device, CUcontext* context) const {
    static std::mutex mutex;
    static std::map<int, CUcontext> retained;
    std::lock_guard lock(mutex);
    auto found = retained.find(device);
    if (found != retained.end()) {
        *context = found->second;
        return CUDA_SUCCESS;
    }
    CUdevice handle = 0;
    CUresult code = DeviceGet(&handle, device);
    if (code == CUDA_SUCCESS) code = DevicePrimaryCtxRetain(context, handle);
    if (code == CUDA_SUCCESS) retained[device] = *context;
    return code;
}

std::string CudaDriver::describe(CUresult code) const {
    const char* name = nullptr;
    const char* text = nullptr;
    if (GetErrorName(code, &name) != CUDA_SUCCESS || !name) name = "unknown CUDA error";
    if (GetErrorString(code, &text) != CUDA_SUCCESS || !text) text = "no text";
    return std::string(name) + " (" + std::to_string(code) + "): " + text;
}

}  // namespace xds

using xds::ContextScope;
using xds::CudaDriver;

namespace {
void put(char* text, size_t size, const std::string& value) {
    if (size == 0) return;
    std::strncpy(text, value.c_str(), size - 1);
    text[size - 1] = 0;
}
}  // namespace

// Number of usable devices; 0 with the reason in `text`.
XDS_API int32_t xds_cuda_device_count(char* text, size_t size) {
    std::string reason;
    const CudaDriver* cuda = CudaDriver::get(&reason);
    int count = 0;
    int code = cuda ? cuda->DeviceGetCount(&count) : xds::CUDA_SUCCESS;
    if (code != xds::CUDA_SUCCESS) {  // it served the parent of this process, before the fork
        count = 0;
        reason = "cuDeviceGetCount: " + cuda->describe(code);
    }
    put(text, size, reason);
    return count;
}

// Name of a device and the driver's CUDA version (1000 * major + 10 * minor).
XDS_API int32_t xds_cuda_device_name(int32_t device, char* name, size_t size, int32_t* version) {
    const CudaDriver* cuda = CudaDriver::get();
    if (!cuda) return -1;
    xds::CUdevice handle = 0;
    int code = cuda->DeviceGet(&handle, device);
    if (code == xds::CUDA_SUCCESS) code = cuda->DeviceGetName(name, static_cast<int>(size), handle);
    if (code == xds::CUDA_SUCCESS) code = cuda->DriverGetVersion(version);
    return code;
}

// Free and total bytes of a device's memory.
XDS_API int32_t xds_cuda_memory(int32_t device, uint64_t* free_nbytes, uint64_t* total_nbytes) {
    const CudaDriver* cuda = CudaDriver::get();
    if (!cuda) return -1;
    ContextScope scope(*cuda, device);
    if (scope.code() != xds::CUDA_SUCCESS) return scope.code();
    size_t free_size = 0, total_size = 0;
    int code = cuda->MemGetInfo(&free_size, &total_size);
    *free_nbytes = free_size;
    *total_nbytes = total_size;
    return code;
}

// What an address is: device ordinal and whether it is managed memory. -1: no driver; else a CUresult.
XDS_API int32_t xds_cuda_pointer(uint64_t address, int32_t* device, int32_t* memory_type, int32_t* managed) {
    const CudaDriver* cuda = CudaDriver::get();
    if (!cuda) return -1;
    unsigned type = 0, is_managed = 0;
    int ordinal = -1;
    int code = cuda->PointerGetAttribute(&type, xds::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
    if (code == xds::CUDA_SUCCESS)
        code = cuda->PointerGetAttribute(&ordinal, xds::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    if (code == xds::CUDA_SUCCESS)
        code = cuda->PointerGetAttribute(&is_managed, xds::CU_POINTER_ATTRIBUTE_IS_MANAGED, address);
    *device = ordinal;
    *memory_type = static_cast<int32_t>(type);
    *managed = static_cast<int32_t>(is_managed);
    return code;
}
