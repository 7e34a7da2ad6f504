// Limits of the machine without any library: raw reads (threads or io_uring, O_DIRECT or buffered) and memcpy.
// Built and run by limits.py; prints one JSON object. Layer: tools.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

[[noreturn]] void fail(const char *what, int error) {
    std::printf("{\"error\": \"%s: %s\"}\n", what, std::strerror(error));
    std::exit(1);
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

char *pages(size_t nbytes) {
    void *at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (at == MAP_FAILED) fail("mmap", errno);
    return static_cast<char *>(at);
}

struct File {
    int fd;
    uint64_t nbytes;
};

struct Chunk {
    int fd;
    uint64_t offset;
    uint32_t nbytes;
};

std::vector<Chunk> cut(const std::vector<File> &files, uint64_t step, bool direct) {
    std::vector<Chunk> chunks;
    for (const File &file : files)
        for (uint64_t offset = 0; offset < file.nbytes; offset += step) {
            uint64_t left = file.nbytes - offset;
            uint64_t want = left < step ? left : step;
            if (direct) want = (want + 4095) / 4096 * 4096;  // a read past the end is short, and allowed
            chunks.push_back({file.fd, offset, static_cast<uint32_t>(want)});
        }
    return chunks;
}

void by_threads(const std::vector<Chunk> &chunks, uint64_t step, int threads, std::atomic<uint64_t> &total, double &start) {
    std::vector<char *> buffers;
    for (int i = 0; i < threads; ++i) buffers.push_back(pages(step + 4096));
    std::atomic<size_t> next{0};
    std::atomic<int> error{0};
    std::vector<std::thread> pool;
    start = now();
    for (int i = 0; i < threads; ++i)
        pool.emplace_back([&, i] {
            for (size_t at = next++; at < chunks.size() && !error; at = next++) {
                const Chunk &chunk = chunks[at];
                uint64_t done = 0;
                while (done < chunk.nbytes) {
                    ssize_t got = pread(chunk.fd, buffers[i] + done, chunk.nbytes - done, chunk.offset + done);
                    if (got < 0 && errno == EINTR) continue;
                    if (got < 0) error = errno;
                    if (got <= 0) break;
                    done += got;
                    if (got % 4096) break;
                }
                total += done;
            }
        });
    for (auto &thread : pool) thread.join();
    if (error) fail("pread", error);
}

void by_uring(const std::vector<Chunk> &chunks, uint64_t step, unsigned depth, std::atomic<uint64_t> &total, double &start) {
    io_uring_params params{};
    int ring = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    if (ring < 0) fail("io_uring_setup", errno);
    size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    auto *sq = static_cast<char *>(mmap(nullptr, sq_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING));
    auto *cq = static_cast<char *>(mmap(nullptr, cq_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING));
    auto *sqes = static_cast<io_uring_sqe *>(
        mmap(nullptr, params.sq_entries * sizeof(io_uring_sqe), PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES));
    if (sq == MAP_FAILED || cq == MAP_FAILED || sqes == MAP_FAILED) fail("mmap of the ring", errno);
    auto *sq_tail = reinterpret_cast<unsigned *>(sq + params.sq_off.tail);
    auto *sq_array = reinterpret_cast<unsigned *>(sq + params.sq_off.array);
    unsigned sq_mask = *reinterpret_cast<unsigned *>(sq + params.sq_off.ring_mask);
    auto *cq_head = reinterpret_cast<unsigned *>(cq + params.cq_off.head);
    auto *cq_tail = reinterpret_cast<unsigned *>(cq + params.cq_off.tail);
    unsigned cq_mask = *reinterpret_cast<unsigned *>(cq + params.cq_off.ring_mask);
    auto *cqes = reinterpret_cast<io_uring_cqe *>(cq + params.cq_off.cqes);

    std::vector<iovec> buffers;
    for (unsigned i = 0; i < depth; ++i) buffers.push_back({pages(step + 4096), step + 4096});
    if (syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, buffers.data(), depth) < 0)
        fail("io_uring_register of buffers", errno);
    std::vector<unsigned> free_slots;
    for (unsigned i = 0; i < depth; ++i) free_slots.push_back(i);
    size_t next = 0, finished = 0;
    start = now();
    while (finished < chunks.size()) {
        unsigned posted = 0;
        while (!free_slots.empty() && next < chunks.size()) {
            unsigned slot = free_slots.back();
            free_slots.pop_back();
            unsigned tail = *sq_tail, index = tail & sq_mask;
            io_uring_sqe &sqe = sqes[index];
            std::memset(&sqe, 0, sizeof sqe);
            sqe.opcode = IORING_OP_READ_FIXED;
            sqe.fd = chunks[next].fd;
            sqe.off = chunks[next].offset;
            sqe.addr = reinterpret_cast<uint64_t>(buffers[slot].iov_base);
            sqe.len = chunks[next].nbytes;
            sqe.buf_index = static_cast<uint16_t>(slot);
            sqe.user_data = slot;
            sq_array[index] = index;
            __atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
            ++next, ++posted;
        }
        if (syscall(SYS_io_uring_enter, ring, posted, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0 && errno != EINTR)
            fail("io_uring_enter", errno);
        unsigned head = *cq_head, end = __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE);
        for (; head != end; ++head) {
            io_uring_cqe &cqe = cqes[head & cq_mask];
            if (cqe.res < 0) fail("read by io_uring", -cqe.res);
            total += static_cast<uint64_t>(cqe.res);
            free_slots.push_back(static_cast<unsigned>(cqe.user_data));
            ++finished;
        }
        __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
    }
}

void copy_memory(uint64_t nbytes, int threads) {
    char *source = pages(nbytes), *target = pages(nbytes);
    double best = 0;
    for (int round = 0; round < 3; ++round) {
        std::vector<std::thread> pool;
        double start = now();
        uint64_t part = nbytes / threads;
        for (int i = 0; i < threads; ++i)
            pool.emplace_back([=] { std::memcpy(target + i * part, source + i * part, part); });
        for (auto &thread : pool) thread.join();
        double rate = static_cast<double>(part * threads) / (now() - start);
        if (rate > best) best = rate;
    }
    std::printf("{\"nbytes\": %llu, \"bytes_per_s\": %.0f}\n", static_cast<unsigned long long>(nbytes), best);
}

}  // namespace

// probe memcpy NBYTES THREADS | probe MODE CHUNK_NBYTES THREADS_OR_DEPTH WILLNEED FILE...
int main(int argc, char **argv) {
    std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "memcpy" && argc == 4) {
        copy_memory(std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]));
        return 0;
    }
    bool uring = mode == "uring-direct", direct = uring || mode == "threads-direct";
    if ((!direct && mode != "threads-buffered") || argc < 6) {
        std::fprintf(stderr, "usage: probe memcpy NBYTES THREADS | probe uring-direct|threads-direct|threads-buffered "
                             "CHUNK_NBYTES THREADS_OR_DEPTH WILLNEED FILE...\n");
        return 2;
    }
    uint64_t step = std::strtoull(argv[2], nullptr, 10);
    int width = std::atoi(argv[3]);
    bool willneed = std::atoi(argv[4]) != 0;
    std::vector<File> files;
    for (int i = 5; i < argc; ++i) {
        int fd = open(argv[i], O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
        if (fd < 0) fail(argv[i], errno);
        struct stat info;
        if (fstat(fd, &info) < 0) fail("fstat", errno);
        files.push_back({fd, static_cast<uint64_t>(info.st_size)});
    }
    std::vector<Chunk> chunks = cut(files, step, direct);
    std::atomic<uint64_t> total{0};
    double start = 0, advice_s = 0;
    if (willneed) {
        double begin = now();
        for (const File &file : files) posix_fadvise(file.fd, 0, 0, POSIX_FADV_WILLNEED);
        advice_s = now() - begin;
    }
    if (uring)
        by_uring(chunks, step, static_cast<unsigned>(width), total, start);
    else
        by_threads(chunks, step, width, total, start);
    double seconds = now() - start + advice_s;
    std::printf("{\"nbytes\": %llu, \"seconds\": %.6f, \"bytes_per_s\": %.0f}\n",
                static_cast<unsigned long long>(total.load()), seconds, static_cast<double>(total.load()) / seconds);
    return 0;
}
