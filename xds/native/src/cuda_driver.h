// The CUDA driver, opened with dlopen. Layer: native, below the ring; includes nothing of ours.
//
// Types and constants are those of cuda.h (driver API); only what the mover calls is here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace xds {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr CUresult CUDA_ERROR_OUT_OF_MEMORY = 2;
constexpr CUresult CUDA_ERROR_NOT_READY = 600;
constexpr CUresult CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712;
constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
constexpr unsigned CU_EVENT_DISABLE_TIMING = 2;
constexpr unsigned CU_MEMHOSTREGISTER_PORTABLE = 1;
constexpr int CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2;
constexpr int CU_POINTER_ATTRIBUTE_IS_MANAGED = 8;
constexpr int CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9;
constexpr int CU_MEMORYTYPE_DEVICE = 2;

struct CudaDriver {
    CUresult (*Init)(unsigned);
    CUresult (*DriverGetVersion)(int*);
    CUresult (*DeviceGetCount)(int*);
    CUresult (*DeviceGet)(CUdevice*, int);
    CUresult (*DeviceGetName)(char*, int, CUdevice);
    CUresult (*DevicePrimaryCtxRetain)(CUcontext*, CUdevice);
    CUresult (*CtxPushCurrent)(CUcontext);
    CUresult (*CtxPopCurrent)(CUcontext*);
    CUresult (*CtxSetCurrent)(CUcontext);
    CUresult (*StreamCreate)(CUstream*, unsigned);
    CUresult (*StreamDestroy)(CUstream);
    CUresult (*StreamWaitEvent)(CUstream, CUevent, unsigned);
    CUresult (*EventCreate)(CUevent*, unsigned);
    CUresult (*EventDestroy)(CUevent);
    CUresult (*EventRecord)(CUevent, CUstream);
    CUresult (*EventQuery)(CUevent);
    CUresult (*MemHostRegister)(void*, size_t, unsigned);
    CUresult (*MemHostUnregister)(void*);
    CUresult (*MemAlloc)(CUdeviceptr*, size_t);
    CUresult (*MemFree)(CUdeviceptr);
    CUresult (*MemcpyDtoH)(void*, CUdeviceptr, size_t);
    CUresult (*MemcpyDtoHAsync)(void*, CUdeviceptr, size_t, CUstream);
    CUresult (*MemcpyHtoDAsync)(CUdeviceptr, const void*, size_t, CUstream);
    CUresult (*MemGetInfo)(size_t*, size_t*);
    CUresult (*PointerGetAttribute)(void*, int, CUdeviceptr);
    CUresult (*GetErrorName)(CUresult, const char**);
    CUresult (*GetErrorString)(CUresult, const char**);

    // The driver, initialised once a process; null with the reason where there is none.
    static const CudaDriver* get(std::string* reason = nullptr);

    // The primary context of a device, retained once and shared with the runtime API (CuPy, torch).
    CUresult primary_context(int device, CUcontext* context) const;

    std::string describe(CUresult code) const;
};

// Makes a device's primary context current for a scope of a foreign thread, and puts the old one back.
class ContextScope {
  public:
    ContextScope(const CudaDriver& cuda, int device) : cuda_(cuda) {
        CUcontext context = nullptr;
        code_ = cuda.primary_context(device, &context);
        if (code_ == CUDA_SUCCESS) code_ = cuda.CtxPushCurrent(context);
    }
    ~ContextScope() {
        CUcontext popped = nullptr;
        if (code_ == CUDA_SUCCESS) cuda_.CtxPopCurrent(&popped);
    }
    ContextScope(const ContextScope&) = delete;
    ContextScope& operator=(const ContextScope&) = delete;
    CUresult code() const { return code_; }

  private:
    const CudaDriver& cuda_;
    CUresult code_;
};

}  // namespace xds
