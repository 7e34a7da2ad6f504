// The mover under sanitizers: seeded layouts of segments from real files to host memory and to the fake GPU, through
// every method; cancellation, failures and closing while it runs. Every byte is checked.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "abi.h"

extern "C" {
void* xds_mover_create(const xds_mover_config*);
void xds_mover_destroy(void*);
uint64_t xds_mover_pinned_nbytes(void*);
void* xds_job_create(void*, const int32_t*, uint32_t, int32_t, int32_t, uint32_t);
int64_t xds_job_add(void*, const xds_segment*, uint64_t, int32_t, uint64_t, int32_t*);
void xds_job_seal(void*);
int32_t xds_job_wait(void*, int64_t);
int32_t xds_job_next_ready(void*, int64_t, uint64_t*);
void xds_job_cancel(void*);
int32_t xds_job_drained(void*);
int32_t xds_job_event_fd(void*);
void xds_job_failure(void*, xds_failure*);
void xds_job_counters(void*, xds_counters*);
void xds_job_free(void*);
}

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition);    \
            std::abort();                                                                 \
        }                                                                                 \
    } while (0)

namespace {

constexpr int64_t SECOND = 1'000'000'000;

struct FakeCuda {
    void* library = dlopen(FAKE_CUDA_LIBRARY, RTLD_NOW);
    template <typename F>
    F* symbol(const char* name) {
        void* found = dlsym(library, name);
        CHECK(found);
        return reinterpret_cast<F*>(found);
    }
    void set(const char* knob, int64_t value) { symbol<void(const char*, int64_t)>("fake_cuda_set")(knob, value); }
    int64_t get(const char* counter) { return symbol<int64_t(const char*)>("fake_cuda_get")(counter); }
    uint64_t allocate(size_t nbytes) {
        symbol<int(void*)>("cuCtxPushCurrent_v2")(reinterpret_cast<void*>(1));
        unsigned long long address = 0;
        CHECK(symbol<int(unsigned long long*, size_t)>("cuMemAlloc_v2")(&address, nbytes) == 0);
        void* popped;
        symbol<int(void**)>("cuCtxPopCurrent_v2")(&popped);
        return address;
    }
    void write(uint64_t to, const void* from, size_t nbytes) {
        CHECK(symbol<int(unsigned long long, const void*, size_t)>("cuMemcpyHtoD_v2")(to, from, nbytes) == 0);
    }
    void free(uint64_t address) { symbol<int(unsigned long long)>("cuMemFree_v2")(address); }
    void read(void* to, uint64_t from, size_t nbytes) {
        CHECK(symbol<int(void*, unsigned long long, size_t)>("cuMemcpyDtoH_v2")(to, from, nbytes) == 0);
    }
};

FakeCuda& cuda() {
    static FakeCuda made;
    return made;
}

struct TestFile {
    std::string path;
    int fd;
    std::vector<unsigned char> bytes;

    TestFile(const std::string& folder, size_t nbytes, unsigned seed) {
        std::mt19937_64 random(seed);
        bytes.resize(nbytes);
        for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
        path = folder + "/xds-test-XXXXXX";
        fd = mkstemp(path.data());
        CHECK(fd >= 0);
        CHECK(::write(fd, bytes.data(), nbytes) == static_cast<ssize_t>(nbytes));
        fsync(fd);
    }
    ~TestFile() {
        ::close(fd);
        ::unlink(path.c_str());
    }
    void cool() const { posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); }
};

uint32_t only(std::initializer_list<xds_method> methods) {
    uint32_t allowed = 0;
    for (xds_method method : methods) allowed |= 1u << method;
    return ~allowed;
}

xds_mover_config config(uint32_t forbid = 0, uint32_t chunk = 64 << 10, uint32_t threads = 4) {
    return {threads, 3, 2, chunk, forbid, 1};
}

// Segments over one or two files with gaps, runs, tiny and large pieces, zero lengths; destinations in one buffer of
// `room` bytes, ascending, with padding here and there. Returns the end of what was used.
uint64_t layout(std::mt19937_64& random, const std::vector<TestFile*>& files, uint64_t base, uint64_t room,
                std::vector<xds_segment>* out) {
    uint64_t at = 0, offset = 0;
    uint32_t file = 0;
    while (out->size() < 400) {
        uint64_t size = files[file]->bytes.size();
        uint64_t nbytes = random() % 8 == 0 ? random() % 300'000 : random() % 5000;
        if (random() % 16 == 0) nbytes = 0;
        if (random() % 4 == 0) offset += random() % 9000;
        if (offset + nbytes > size || random() % 64 == 0) {
            file = static_cast<uint32_t>(random() % files.size());
            offset = random() % 4096;
            continue;
        }
        uint32_t flags = 0;
        if (random() % 3 == 0) {
            at += random() % 600;
            flags = random() % 2 ? XDS_GAP_WRITABLE : 0;
        }
        if (at + nbytes > room) break;
        out->push_back({offset, nbytes, base + at, file, flags});
        at += nbytes;
        offset += nbytes;
    }
    return at;
}

void expect(const std::vector<xds_segment>& segments, const std::vector<TestFile*>& files, uint64_t base,
            const unsigned char* got) {
    for (const xds_segment& s : segments)
        CHECK(std::memcmp(got + (s.destination - base), files[s.file]->bytes.data() + s.offset, s.nbytes) == 0);
}

void layouts(bool gpu, uint32_t forbid, bool cold, unsigned seed, const std::string& folder) {
    std::mt19937_64 random(seed);
    TestFile first(folder, 3'000'017, seed), second(folder, 700'001, seed + 1);
    std::vector<TestFile*> files{&first, &second};
    if (cold)
        for (TestFile* file : files) file->cool();
    constexpr uint64_t ROOM = 4 << 20;
    std::vector<unsigned char> host(ROOM, 0x5A);
    uint64_t base = gpu ? cuda().allocate(ROOM) : reinterpret_cast<uint64_t>(host.data());
    xds_mover_config c = config(forbid);
    void* mover = xds_mover_create(&c);
    int32_t fds[] = {first.fd, second.fd};
    std::vector<xds_segment> all;
    uint64_t used = 0;
    void* job = xds_job_create(mover, fds, 2, gpu ? 0 : -1, 0, 0);
    int batches = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < batches; ++i) {
        std::vector<xds_segment> segments;
        used += layout(random, files, base + used, (ROOM - used) / 2, &segments);
        int32_t code = 0;
        CHECK(xds_job_add(job, segments.data(), segments.size(), gpu, 0, &code) == i);
        all.insert(all.end(), segments.begin(), segments.end());
    }
    xds_job_seal(job);
    std::vector<bool> ready(static_cast<size_t>(batches), false);
    uint64_t batch;
    int32_t status;
    while ((status = xds_job_next_ready(job, 20 * SECOND, &batch)) == XDS_OK) {
        CHECK(!ready[batch]);
        ready[batch] = true;
    }
    CHECK(status == XDS_END);
    CHECK(std::count(ready.begin(), ready.end(), true) == batches);
    CHECK(xds_job_wait(job, 20 * SECOND) == XDS_OK);
    xds_counters counters;
    xds_job_counters(job, &counters);
    uint64_t nbytes = 0, by_method = 0;
    for (auto& s : all) nbytes += s.nbytes;
    for (uint64_t value : counters.method_nbytes) by_method += value;
    CHECK(counters.landed_nbytes == nbytes && by_method == nbytes);
    if (gpu) cuda().read(host.data(), base, ROOM);
    expect(all, files, base, host.data());
    if (!gpu) {
        // What no segment covers and no flag gives away is as it was.
        std::vector<bool> free(ROOM, true);
        uint64_t end = 0;
        for (auto& s : all) {
            uint64_t begin = s.destination - base;
            for (uint64_t i = (s.flags & XDS_GAP_WRITABLE) ? std::min(end, begin) : begin; i < begin + s.nbytes; ++i)
                free[i] = false;
            end = begin + s.nbytes;
        }
        for (uint64_t i = 0; i < ROOM; ++i) CHECK(!free[i] || host[i] == 0x5A);
    }
    xds_job_free(job);
    xds_mover_destroy(mover);
    if (gpu) {
        cuda().free(base);
        CHECK(cuda().get("registered_nbytes") == 0);
        CHECK(cuda().get("events") == 0);
        CHECK(cuda().get("unpinned_copies") == 0);
        CHECK(cuda().get("streams_destroyed_busy") == 0);
    }
}

// Memory to a file: seeded runs and gaps, also unaligned; what no segment covers stays as it was.
void written(bool gpu, uint32_t forbid, unsigned seed, const std::string& folder) {
    std::mt19937_64 random(seed);
    constexpr uint64_t ROOM = 3 << 20;
    TestFile file(folder, ROOM, seed);
    std::vector<unsigned char> memory(ROOM), expected = file.bytes, got(ROOM);
    for (auto& byte : memory) byte = static_cast<unsigned char>(random());
    uint64_t base = gpu ? cuda().allocate(ROOM) : reinterpret_cast<uint64_t>(memory.data());
    if (gpu) cuda().write(base, memory.data(), ROOM);
    xds_mover_config c = config(forbid);
    void* mover = xds_mover_create(&c);
    void* job = xds_job_create(mover, &file.fd, 1, gpu ? 0 : -1, 1, 0);
    int event = xds_job_event_fd(job);
    CHECK(event >= 0);
    uint64_t word;
    CHECK(read(event, &word, sizeof word) < 0 && errno == EAGAIN);
    uint64_t offset = random() % 9000, nbytes_all = 0;
    for (int b = 0; b < 3; ++b) {
        std::vector<xds_segment> segments;
        for (int i = 0; i < 60; ++i) {
            uint64_t nbytes = random() % 4 == 0 ? random() % 200'000 : random() % 9000;
            if (random() % 3 == 0) offset += random() % 9000;
            if (offset + nbytes > ROOM) break;
            uint64_t from = random() % (ROOM - nbytes);
            segments.push_back({offset, nbytes, base + from, 0, XDS_GAP_WRITABLE});
            std::memcpy(expected.data() + offset, memory.data() + from, nbytes);
            offset += nbytes;
            nbytes_all += nbytes;
        }
        int32_t code = 0;
        CHECK(xds_job_add(job, segments.data(), segments.size(), gpu, 0, &code) == b);
    }
    xds_job_seal(job);
    CHECK(xds_job_wait(job, 20 * SECOND) == XDS_OK);
    CHECK(read(event, &word, sizeof word) == sizeof word);
    xds_counters counters;
    xds_job_counters(job, &counters);
    CHECK(counters.landed_nbytes == nbytes_all);
    xds_job_free(job);
    xds_mover_destroy(mover);
    CHECK(pread(file.fd, got.data(), ROOM, 0) == static_cast<ssize_t>(ROOM));
    CHECK(got == expected);
    if (gpu) cuda().free(base);
    CHECK(cuda().get("registered_nbytes") == 0 && cuda().get("unpinned_copies") == 0);
}

struct Single {
    TestFile file;
    std::vector<unsigned char> host;
    uint64_t base = 0;
    bool gpu;
    void* mover;
    void* job;

    Single(bool gpu_, size_t nbytes, uint32_t forbid = 0) : file("/dev/shm", nbytes, 7), host(nbytes, 0x5A), gpu(gpu_) {
        base = gpu ? cuda().allocate(nbytes) : reinterpret_cast<uint64_t>(host.data());
        xds_mover_config c = config(forbid);
        mover = xds_mover_create(&c);
        job = xds_job_create(mover, &file.fd, 1, gpu ? 0 : -1, 0, 0);
    }
    int64_t add(uint64_t nbytes, uint64_t offset = 0) {
        xds_segment segment{offset, nbytes, base, 0, 0};
        int32_t code = 0;
        return xds_job_add(job, &segment, 1, gpu, 0, &code);
    }
    ~Single() {
        if (job) xds_job_free(job);
        if (mover) xds_mover_destroy(mover);
        if (gpu) cuda().free(base);
    }
};

void short_file(bool gpu) {
    Single s(gpu, 1'000'000);
    CHECK(ftruncate(s.file.fd, 600'001) == 0);
    CHECK(s.add(1'000'000) == 0);
    xds_job_seal(s.job);
    CHECK(xds_job_wait(s.job, 20 * SECOND) == XDS_SHORT_READ);
    xds_failure failure;
    xds_job_failure(s.job, &failure);
    CHECK(failure.status == XDS_SHORT_READ && failure.offset >= 600'001 && failure.offset + failure.nbytes <= 1'000'000);
}

void shrinking_while_mapped() {
    // SIGBUS country: the file is cut and grown again under copies from its mapping.
    for (int round = 0; round < 20; ++round) {
        Single s(false, 8'000'000, only({XDS_MAPPED}));
        std::thread cutter([&] {
            for (int i = 0; i < 50; ++i) {
                CHECK(ftruncate(s.file.fd, 4096 * (i % 7)) == 0);
                CHECK(ftruncate(s.file.fd, 8'000'000) == 0);
            }
        });
        CHECK(s.add(8'000'000) == 0);
        xds_job_seal(s.job);
        int32_t status = xds_job_wait(s.job, 20 * SECOND);
        CHECK(status == XDS_OK || status == XDS_SHORT_READ);
        cutter.join();
    }
}

void cancelled(bool gpu) {
    if (gpu) cuda().set("copy_delay_us", 2000);
    {
        Single s(gpu, 20'000'000);
        CHECK(s.add(20'000'000) == 0);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        xds_job_cancel(s.job);
        while (!xds_job_drained(s.job)) std::this_thread::yield();
        int64_t copies = gpu ? cuda().get("copies") : 0;
        std::vector<unsigned char> before = s.host;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        // Drained means: nothing is written any more.
        CHECK(before == s.host);
        if (gpu) CHECK(cuda().get("copies") == copies);
        CHECK(xds_job_wait(s.job, SECOND) == XDS_CANCELED);
        CHECK(s.add(1) == -XDS_CANCELED);
    }
    if (gpu) cuda().set("copy_delay_us", 0);
}

void failing(const char* what, int status) {
    Single s(true, 4'000'000);
    cuda().set(what, 3);
    CHECK(s.add(4'000'000) == 0);
    xds_job_seal(s.job);
    CHECK(xds_job_wait(s.job, 20 * SECOND) == status);
    xds_failure failure;
    xds_job_failure(s.job, &failure);
    CHECK(failure.code == 2 && std::strlen(failure.text) > 10);
    cuda().set(what, 0);
    // The next job is not the worse for it.
    void* again = xds_job_create(s.mover, &s.file.fd, 1, 0, 0, 0);
    xds_segment segment{0, 4'000'000, s.base, 0, 0};
    int32_t code = 0;
    CHECK(xds_job_add(again, &segment, 1, 1, 0, &code) == 0);
    xds_job_seal(again);
    CHECK(xds_job_wait(again, 20 * SECOND) == XDS_OK);
    cuda().read(s.host.data(), s.base, 4'000'000);
    CHECK(s.host == s.file.bytes);
    xds_job_free(again);
}

void refused() {
    Single s(false, 1000);
    int32_t code = 0;
    xds_segment wrong_file{0, 1, s.base, 1, 0}, wrong_offset{UINT64_MAX - 5, 10, s.base, 0, 0};
    CHECK(xds_job_add(s.job, &wrong_file, 1, 0, 0, &code) == -XDS_SYSTEM && code == EINVAL);
    CHECK(xds_job_add(s.job, &wrong_offset, 1, 0, 0, &code) == -XDS_SYSTEM);
    xds_mover_config none = config();
    none.threads = 0;
    CHECK(!xds_mover_create(&none));
    none = config();
    none.chunk_nbytes = 5000;
    CHECK(!xds_mover_create(&none));
}

void side_by_side() {
    TestFile file("/dev/shm", 6'000'000, 3);
    xds_mover_config c = config();
    void* mover = xds_mover_create(&c);
    std::vector<std::thread> threads;
    for (int t = 0; t < 16; ++t) {
        threads.emplace_back([&, t] {
            std::vector<unsigned char> host(6'000'000);
            bool gpu = t % 2 == 0;
            uint64_t base = gpu ? cuda().allocate(host.size()) : reinterpret_cast<uint64_t>(host.data());
            void* job = xds_job_create(mover, &file.fd, 1, gpu ? 0 : -1, 0, 0);
            xds_segment segment{0, host.size(), base, 0, 0};
            int32_t code = 0;
            CHECK(xds_job_add(job, &segment, 1, gpu, 0, &code) == 0);
            if (t % 5 == 4) {
                xds_job_cancel(job);
                while (!xds_job_drained(job)) std::this_thread::yield();
            } else {
                xds_job_seal(job);
                CHECK(xds_job_wait(job, 60 * SECOND) == XDS_OK);
                if (gpu) cuda().read(host.data(), base, host.size());
                CHECK(host == file.bytes);
            }
            xds_job_free(job);
            if (gpu) cuda().free(base);
        });
    }
    for (auto& thread : threads) thread.join();
    xds_mover_destroy(mover);
    CHECK(cuda().get("registered_nbytes") == 0);
}

void closed_while_running() {
    Single s(true, 20'000'000);
    cuda().set("copy_delay_us", 1000);
    CHECK(s.add(20'000'000) == 0);
    xds_mover_destroy(s.mover);
    s.mover = nullptr;
    cuda().set("copy_delay_us", 0);
    CHECK(xds_job_drained(s.job));
    CHECK(xds_job_wait(s.job, SECOND) == XDS_CANCELED);
    CHECK(s.add(1) == -XDS_CANCELED);
    CHECK(cuda().get("registered_nbytes") == 0);
}

}  // namespace

int main() {
    setenv("XDS_CUDA_LIBRARY", FAKE_CUDA_LIBRARY, 1);
    const char* disk = std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp";
    unsigned seed = 1;
    for (bool gpu : {false, true}) {
        for (int round = 0; round < 6; ++round) layouts(gpu, 0, false, seed++, "/dev/shm");
        for (int round = 0; round < 6; ++round) layouts(gpu, 0, round % 2, seed++, disk);
        for (xds_method method : {XDS_PREAD, XDS_MAPPED})
            for (int round = 0; round < 4; ++round) layouts(gpu, only({method}), false, seed++, "/dev/shm");
        for (xds_method method : {XDS_URING, XDS_DIRECT, XDS_BUFFERED})
            for (int round = 0; round < 4; ++round)
                layouts(gpu, only({method, XDS_PREAD}), true, seed++, disk);
        for (int round = 0; round < 2; ++round) {
            written(gpu, 0, seed++, "/dev/shm");
            written(gpu, 0, seed++, disk);
            for (xds_method method : {XDS_PREAD, XDS_MAPPED}) written(gpu, only({method}), seed++, "/dev/shm");
            written(gpu, only({XDS_BUFFERED}), seed++, disk);
        }
        short_file(gpu);
        cancelled(gpu);
    }
    shrinking_while_mapped();
    failing("fail_register", XDS_CUDA);
    failing("fail_copy", XDS_CUDA);
    refused();
    side_by_side();
    closed_while_running();
    std::puts("test_mover: all passed");
}
