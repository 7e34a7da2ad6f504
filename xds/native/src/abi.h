// The flat C ABI of the mover: every symbol Python calls. Layer: native; includes nothing of ours.
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

// The destination bytes between the previous segment's end and this one's start may be overwritten (at most 4095).
constexpr uint32_t XDS_GAP_WRITABLE = 1;

// How one call ended, and what a job's failure was.
enum xds_status : int32_t {
    XDS_OK = 0,
    XDS_PENDING = 1,
    XDS_SYSTEM = 2,       // code is an errno
    XDS_SHORT_READ = 3,   // the file ended before the range did
    XDS_CUDA = 4,         // code is a CUresult
    XDS_CANCELED = 5,
    XDS_END = 6,          // no batch is left to wait for
};

// How a chunk was read. The order is that of xds.engine.mover.METHODS.
enum xds_method : uint32_t {
    XDS_PREAD = 0,     // from the page cache or a memory file system
    XDS_MAPPED = 1,    // the same bytes, copied out of a mapping
    XDS_BUFFERED = 2,  // through the page cache, not resident before
    XDS_DIRECT = 3,    // O_DIRECT, one thread a request
    XDS_URING = 4,     // O_DIRECT through io_uring
    XDS_CUFILE = 5,    // cuFile, real DMA proved
    XDS_METHOD_COUNT = 6,
};

struct xds_mover_config {
    uint32_t threads;      // at most; started as work asks for them
    uint32_t cpu_threads;  // at most so many copy from the page cache at once (the CPU quota)
    uint32_t slots;        // ring slots a thread
    uint32_t chunk_nbytes; // one slot, a multiple of 4096
    uint32_t forbid;       // bit (1 << xds_method): never use it
    uint32_t streams;      // copy streams a device, shared by the threads
};

struct xds_failure {
    int32_t status;
    int32_t code;
    uint32_t file;
    uint32_t reserved;
    uint64_t offset;
    uint64_t nbytes;
    char text[256];
};

struct xds_counters {
    uint64_t landed_nbytes;
    uint64_t method_nbytes[XDS_METHOD_COUNT];
    uint64_t commands;
    uint64_t retries;
    uint64_t samples;           // pages asked for with RWF_NOWAIT
    uint64_t samples_resident;
    uint64_t read_ns;           // summed over threads
    uint64_t copy_ns;           // waiting for the copy engine, summed over threads
    uint64_t setup_ns;          // making ring slots, summed over threads
    uint64_t threads;           // that carried at least one chunk
    uint64_t pinned_nbytes;     // of the process, now
    uint64_t notes;             // bits: xds_note
};

enum xds_note : uint64_t {
    XDS_NOTE_URING_DENIED = 1,
    XDS_NOTE_DIRECT_REFUSED = 2,
    XDS_NOTE_NETWORK = 4,
    XDS_NOTE_NO_NOWAIT = 8,         // residency could not be sampled
    XDS_NOTE_BUFFERED_FASTER = 16,  // cold file, buffered reads measured faster than O_DIRECT
    XDS_NOTE_UNREGISTERED = 32,     // io_uring without registered buffers (memlock)
    XDS_NOTE_CUFILE_UNPROVED = 64,  // nvidia-fs is loaded, but the test read was not real DMA
};
