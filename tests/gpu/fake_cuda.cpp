// A CUDA driver for tests: the driver functions the mover calls, on host memory, as strict as the real one is lenient.
//
// Device memory is an address range that nobody can touch (PROT_NONE); the bytes lie in a second mapping that only this
// driver knows, so a CPU write to a device pointer faults. Copies run on an engine thread, in stream order, and read
// their source when they run, not when they are submitted: a ring slot reused too early shows as wrong bytes. A copy
// from memory that is not registered, without a current context, or outside an allocation fails.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
              NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713;
constexpr int DEVICES = 2;
constexpr uint64_t MEMORY = uint64_t{8} << 30;

struct Event {
    uint64_t recorded = 0, done = 0;
};

struct Operation {
    enum Kind { copy, copy_out, record, wait, sleep, fill } kind;
    uint64_t destination = 0, nbytes = 0, ticket = 0;
    const char* source = nullptr;
    Event* event = nullptr;
};

struct Stream {
    int device = 0;
    std::deque<Operation> queue;
};

struct Allocation {
    uint64_t nbytes;
    char* shadow;
    int device;
};

struct Driver {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<uint64_t, Allocation> allocations;
    std::map<uint64_t, uint64_t> registered;
    std::map<std::string, int64_t> knobs;      // tests set them
    std::map<std::string, int64_t> counters;   // tests read them
    std::map<Stream*, std::unique_ptr<Stream>> streams;
    std::map<int, std::unique_ptr<Stream>> legacy;
    std::deque<Event> events;  // kept when destroyed: a queued wait may still name one, as the real driver allows
    int sticky = SUCCESS;
    bool started = false;
    pid_t owner = 0;  // who initialised: as with the real driver, a forked child can do nothing
};

Driver& driver() {
    static auto* made = new Driver;  // never destroyed: the engine thread outlives main
    return *made;
}

bool forked() { return driver().owner && driver().owner != getpid(); }

thread_local std::deque<int> contexts;  // current context: device + 1

Allocation* inside(uint64_t address, uint64_t nbytes, uint64_t* offset) {
    auto& all = driver().allocations;
    auto next = all.upper_bound(address);
    if (next == all.begin()) return nullptr;
    auto& [begin, allocation] = *--next;
    if (address + nbytes > begin + allocation.nbytes) return nullptr;
    *offset = address - begin;
    return &allocation;
}

bool pinned(uint64_t address, uint64_t nbytes) {
    auto& all = driver().registered;
    auto next = all.upper_bound(address);
    if (next == all.begin()) return false;
    --next;
    return address + nbytes <= next->first + next->second;
}

void engine() {
    Driver& d = driver();
    std::unique_lock lock(d.mutex);
    for (;;) {
        bool moved = false;
        auto step = [&](Stream& stream) {
            if (stream.queue.empty()) return;
            Operation& op = stream.queue.front();
            if (op.kind == Operation::wait && op.event->done < op.ticket) return;
            bool is_copy = op.kind == Operation::copy || op.kind == Operation::copy_out;
            if (is_copy && d.knobs["hang"]) return;
            moved = true;
            int64_t delay_us = is_copy ? d.knobs["copy_delay_us"] : 0;
            if (op.kind == Operation::sleep) delay_us = static_cast<int64_t>(op.nbytes);
            if (delay_us) {
                lock.unlock();
                std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
                lock.lock();
            }
            if (is_copy) {
                uint64_t offset = 0;
                Allocation* device = inside(op.destination, op.nbytes, &offset);
                if (!device || device->device != stream.device)
                    d.sticky = ILLEGAL_ADDRESS;
                else if (op.kind == Operation::copy)
                    std::memcpy(device->shadow + offset, op.source, op.nbytes);
                else
                    std::memcpy(const_cast<char*>(op.source), device->shadow + offset, op.nbytes);
                ++d.counters["copies"];
                d.counters["copied_nbytes"] += static_cast<int64_t>(op.nbytes);
            } else if (op.kind == Operation::fill) {
                uint64_t offset = 0;
                if (Allocation* target = inside(op.destination, op.nbytes, &offset))
                    std::memset(target->shadow + offset, static_cast<int>(op.ticket), op.nbytes);
            } else if (op.kind == Operation::record) {
                op.event->done = std::max(op.event->done, op.ticket);
            }
            stream.queue.pop_front();
        };
        for (auto& [key, stream] : d.streams) step(*stream);
        for (auto& [key, stream] : d.legacy) step(*stream);
        d.changed.notify_all();
        if (!moved) d.changed.wait_for(lock, std::chrono::microseconds(200));
    }
}

int current() { return contexts.empty() ? 0 : contexts.back(); }

Stream* find(void* handle) {
    Driver& d = driver();
    if (!handle || handle == reinterpret_cast<void*>(1)) {
        auto& stream = d.legacy[current() - 1];
        if (!stream) {
            stream = std::make_unique<Stream>();
            stream->device = current() - 1;
        }
        return stream.get();
    }
    auto found = d.streams.find(static_cast<Stream*>(handle));
    return found == d.streams.end() ? nullptr : found->second.get();
}

int refused(const char* what) {
    int64_t& left = driver().knobs[std::string("fail_") + what];
    if (left == 0) return SUCCESS;
    if (left > 1) {  // fail on the (n - 1)th call from now
        --left;
        return SUCCESS;
    }
    left = 0;
    auto code = static_cast<int>(driver().knobs[std::string("code_") + what]);
    return code ? code : OUT_OF_MEMORY;
}

}  // namespace

API void fake_cuda_set(const char* knob, int64_t value) {
    std::lock_guard lock(driver().mutex);
    driver().knobs[knob] = value;
}
API int64_t fake_cuda_get(const char* counter) {
    std::lock_guard lock(driver().mutex);
    return driver().counters[counter];
}

API int cuInit(unsigned) {
    Driver& d = driver();
    if (forked()) return NOT_INITIALIZED;
    d.owner = getpid();
    std::lock_guard lock(d.mutex);
    if (!d.started) {
        d.started = true;
        std::thread(engine).detach();
    }
    return SUCCESS;
}
API int cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}
API int cuDeviceGetCount(int* count) {
    if (forked()) return NOT_INITIALIZED;
    *count = DEVICES;
    return SUCCESS;
}
API int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal < DEVICES ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceGetName(char* name, int size, int) {
    std::strncpy(name, "Fake GPU", static_cast<size_t>(size));
    return SUCCESS;
}
API int cuDeviceTotalMem_v2(size_t* nbytes, int) {
    *nbytes = MEMORY;
    return SUCCESS;
}
API int cuDeviceGetAttribute(int* value, int, int) {
    *value = 9;
    return SUCCESS;
}
API int cuDevicePrimaryCtxRetain(void** context, int device) {
    if (forked()) return NOT_INITIALIZED;
    *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
    return SUCCESS;
}
API int cuCtxPushCurrent_v2(void* context) {
    if (forked()) return NOT_INITIALIZED;
    contexts.push_back(static_cast<int>(reinterpret_cast<intptr_t>(context)));
    return SUCCESS;
}
API int cuCtxPopCurrent_v2(void** context) {
    if (contexts.empty()) return INVALID_CONTEXT;
    *context = reinterpret_cast<void*>(static_cast<intptr_t>(contexts.back()));
    contexts.pop_back();
    return SUCCESS;
}
API int cuCtxSetCurrent(void* context) {
    if (forked()) return NOT_INITIALIZED;
    if (!contexts.empty()) contexts.pop_back();
    contexts.push_back(static_cast<int>(reinterpret_cast<intptr_t>(context)));
    return SUCCESS;
}
API int cuStreamCreate(void** stream, unsigned) {
    if (!current()) return INVALID_CONTEXT;
    auto made = std::make_unique<Stream>();
    made->device = current() - 1;
    std::lock_guard lock(driver().mutex);
    *stream = made.get();
    driver().streams[made.get()] = std::move(made);
    return SUCCESS;
}
API int cuStreamDestroy_v2(void* stream) {
    std::lock_guard lock(driver().mutex);
    auto found = driver().streams.find(static_cast<Stream*>(stream));
    if (found == driver().streams.end()) return INVALID_VALUE;
    if (!found->second->queue.empty()) ++driver().counters["streams_destroyed_busy"];
    driver().streams.erase(found);
    return SUCCESS;
}
API int cuStreamWaitEvent(void* handle, void* event, unsigned) {
    std::lock_guard lock(driver().mutex);
    Stream* stream = find(handle);
    if (!stream) return INVALID_VALUE;
    auto* e = static_cast<Event*>(event);
    stream->queue.push_back({.kind = Operation::wait, .ticket = e->recorded, .event = e});
    driver().changed.notify_all();
    return SUCCESS;
}
API int cuEventCreate(void** event, unsigned) {
    if (!current()) return INVALID_CONTEXT;
    std::lock_guard lock(driver().mutex);
    ++driver().counters["events"];
    *event = &driver().events.emplace_back();
    return SUCCESS;
}
API int cuEventDestroy_v2(void* event) {
    std::lock_guard lock(driver().mutex);
    if (!event) return INVALID_VALUE;
    --driver().counters["events"];
    return SUCCESS;
}
API int cuEventRecord(void* event, void* handle) {
    if (!current()) return INVALID_CONTEXT;
    std::lock_guard lock(driver().mutex);
    Stream* stream = find(handle);
    if (!stream) return INVALID_VALUE;
    auto* e = static_cast<Event*>(event);
    stream->queue.push_back({.kind = Operation::record, .ticket = ++e->recorded, .event = e});
    driver().changed.notify_all();
    return SUCCESS;
}
API int cuEventQuery(void* event) {
    std::lock_guard lock(driver().mutex);
    if (driver().sticky) return driver().sticky;
    auto* e = static_cast<Event*>(event);
    return e->done >= e->recorded ? SUCCESS : NOT_READY;
}
API int cuMemHostRegister_v2(void* address, size_t nbytes, unsigned) {
    if (!current()) return INVALID_CONTEXT;
    std::lock_guard lock(driver().mutex);
    if (int code = refused("register")) return code;
    auto begin = reinterpret_cast<uint64_t>(address);
    if (driver().registered.count(begin)) return ALREADY_REGISTERED;
    driver().registered[begin] = nbytes;
    auto& counters = driver().counters;
    counters["registered_nbytes"] += static_cast<int64_t>(nbytes);
    counters["registered_peak_nbytes"] = std::max(counters["registered_peak_nbytes"], counters["registered_nbytes"]);
    return SUCCESS;
}
API int cuMemHostUnregister(void* address) {
    std::lock_guard lock(driver().mutex);
    auto found = driver().registered.find(reinterpret_cast<uint64_t>(address));
    if (found == driver().registered.end()) return NOT_REGISTERED;
    driver().counters["registered_nbytes"] -= static_cast<int64_t>(found->second);
    driver().registered.erase(found);
    return SUCCESS;
}
namespace {
int copy_async(Operation::Kind kind, uint64_t device, const void* host, size_t nbytes, void* handle) {
    if (!current()) return INVALID_CONTEXT;
    std::lock_guard lock(driver().mutex);
    if (int code = refused("copy")) return code;
    Stream* stream = find(handle);
    uint64_t offset = 0;
    if (!stream || !inside(device, nbytes, &offset)) return INVALID_VALUE;
    if (!pinned(reinterpret_cast<uint64_t>(host), nbytes)) {
        ++driver().counters["unpinned_copies"];
        return INVALID_VALUE;
    }
    stream->queue.push_back(
        {.kind = kind, .destination = device, .nbytes = nbytes, .source = static_cast<const char*>(host)});
    driver().changed.notify_all();
    return SUCCESS;
}
}  // namespace
API int cuMemcpyHtoDAsync_v2(unsigned long long destination, const void* source, size_t nbytes, void* handle) {
    return copy_async(Operation::copy, destination, source, nbytes, handle);
}
API int cuMemcpyDtoHAsync_v2(void* destination, unsigned long long source, size_t nbytes, void* handle) {
    return copy_async(Operation::copy_out, source, destination, nbytes, handle);
}
API int cuMemGetInfo_v2(size_t* free_nbytes, size_t* total_nbytes) {
    std::lock_guard lock(driver().mutex);
    uint64_t used = 0;
    for (auto& [address, allocation] : driver().allocations) used += allocation.nbytes;
    *total_nbytes = MEMORY;
    *free_nbytes = MEMORY - used;
    return SUCCESS;
}
API int cuPointerGetAttribute(void* data, int attribute, unsigned long long address) {
    if (forked()) return NOT_INITIALIZED;
    std::lock_guard lock(driver().mutex);
    uint64_t offset = 0;
    Allocation* allocation = inside(address, 1, &offset);
    if (!allocation) return INVALID_VALUE;
    switch (attribute) {
        case 2: *static_cast<unsigned*>(data) = 2; return SUCCESS;
        case 8: *static_cast<unsigned*>(data) = static_cast<unsigned>(driver().knobs["managed"]); return SUCCESS;
        case 9: *static_cast<int*>(data) = allocation->device; return SUCCESS;
        default: return INVALID_VALUE;
    }
}
API int cuGetErrorName(int code, const char** name) {
    *name = code == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
            : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR";
    return SUCCESS;
}
API int cuGetErrorString(int, const char** text) {
    *text = "said the fake driver";
    return SUCCESS;
}

// What tests allocate and look at device memory with.
API int cuMemAlloc_v2(unsigned long long* address, size_t nbytes) {
    if (!current()) return INVALID_CONTEXT;
    size_t size = std::max<size_t>((nbytes + 4095) / 4096 * 4096, 4096);
    std::lock_guard lock(driver().mutex);
    if (int code = refused("alloc")) return code;
    void* visible = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void* shadow = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (visible == MAP_FAILED || shadow == MAP_FAILED) return OUT_OF_MEMORY;
    std::memset(shadow, 0xA5, size);  // whoever reads what nobody wrote sees it
    *address = reinterpret_cast<uint64_t>(visible);
    driver().allocations[*address] = {size, static_cast<char*>(shadow), current() - 1};
    return SUCCESS;
}
API int cuMemFree_v2(unsigned long long address) {
    std::lock_guard lock(driver().mutex);
    auto found = driver().allocations.find(address);
    if (found == driver().allocations.end()) return INVALID_VALUE;
    munmap(reinterpret_cast<void*>(address), found->second.nbytes);
    munmap(found->second.shadow, found->second.nbytes);
    driver().allocations.erase(found);
    return SUCCESS;
}
API int cuMemcpyDtoH_v2(void* destination, unsigned long long source, size_t nbytes) {
    std::lock_guard lock(driver().mutex);
    uint64_t offset = 0;
    Allocation* allocation = inside(source, nbytes, &offset);
    if (!allocation) return INVALID_VALUE;
    std::memcpy(destination, allocation->shadow + offset, nbytes);
    return SUCCESS;
}
API int cuMemcpyHtoD_v2(unsigned long long destination, const void* source, size_t nbytes) {
    std::lock_guard lock(driver().mutex);
    uint64_t offset = 0;
    Allocation* allocation = inside(destination, nbytes, &offset);
    if (!allocation) return INVALID_VALUE;
    std::memcpy(allocation->shadow + offset, source, nbytes);
    return SUCCESS;
}
// Device work that writes one byte value over a range, on a stream: an earlier user of memory.
API int fake_cuda_fill(void* handle, unsigned long long address, int value, size_t nbytes) {
    std::lock_guard lock(driver().mutex);
    Stream* stream = find(handle);
    if (!stream) return INVALID_VALUE;
    stream->queue.push_back({.kind = Operation::fill,
                             .destination = address,
                             .nbytes = nbytes,
                             .ticket = static_cast<uint64_t>(value)});
    return SUCCESS;
}
// Device work that takes a while.
API int fake_cuda_busy(void* handle, uint64_t microseconds) {
    std::lock_guard lock(driver().mutex);
    Stream* stream = find(handle);
    if (!stream) return INVALID_VALUE;
    stream->queue.push_back({.kind = Operation::sleep, .nbytes = microseconds});
    return SUCCESS;
}
