// The flat C ABI of the native core: every symbol Python calls. Layer: native; includes nothing of ours.
#pragma once
#include <cstddef>
#include <cstdint>

#define XDS_API extern "C" __attribute__((visibility("default")))

// One segment of a transfer; xds.plan.SEGMENT is the same 32 bytes.
struct xds_segment {
    uint64_t offset;       // in the file, bytes
    uint64_t nbytes;
    uint64_t destination;  // address, host or device
    uint32_t file;         // index into the job's files
    uint32_t flags;        // XDS_GAP_WRITABLE
};
static_assert(sizeof(xds_segment) == 32);

constexpr uint32_t XDS_GAP_WRITABLE = 1;
