// The mover: threads that read chunks of jobs into ring slots and send them on. Layer: native, the top.
#include "mover.h"

#include "cufile.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <system_error>

namespace xds {
namespace {

uint64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

// ---- one thread ----------------------------------------------------------------------------------------------------

Worker::Worker(Mover& mover, uint32_t index) : mover_(mover), index_(index), slots_(mover.config().slots) {}

void Worker::run() {
    // Waits of a few microseconds are meant as such.
    prctl(PR_SET_TIMERSLACK, 1000);
    while (!mover_.stopping() || reading_ + copying_ > 0) {
        progress();
        Slot* slot = free_slot();
        uint64_t version = 0;
        if (slot && !mover_.stopping() && mover_.take(index_, &slot->chunk, &version)) {
            idle_polls_ = 0;
            start(*slot);
        } else if (reading_ + copying_ > 0) {
            pause();
        } else if (!mover_.stopping()) {
            mover_.sleep(version);
        }
    }
}

Slot* Worker::free_slot() {
    for (Slot& slot : slots_)
        if (slot.state == Slot::State::free) return &slot;
    return nullptr;
}

void Worker::progress() {
    if (reading_ > 0) {
        uring_.reap([this](uint64_t tag, int result) {
            --reading_;
            finish_direct(slots_[tag], result);
        });
    }
    if (copying_ == 0) return;
    const CudaDriver* cuda = CudaDriver::get();
    for (size_t i = 0; i < slots_.size(); ++i) {
        Slot& slot = slots_[i];
        if (slot.state != Slot::State::copying) continue;
        Lane& lane = lanes_[slot.chunk.job->device()];
        CUresult code = cuda->EventQuery(lane.events[i]);
        if (code == CUDA_ERROR_NOT_READY) continue;
        --copying_;
        idle_polls_ = 0;
        slot.chunk.job->count_copy(now_ns() - slot.since_ns);
        if (code != CUDA_SUCCESS)
            fail_cuda(slot, code, "copy of the GPU's memory");
        else if (slot.chunk.job->out())
            write_out(slot);
        else
            finish(slot);
    }
}

void Worker::pause() {
    if (reading_ > 0) {
        uring_.wait(copying_ > 0 ? 20'000 : 20'000'000);
    } else if (++idle_polls_ < 20) {
        sched_yield();
    } else {
        timespec nap{0, 10'000};
        nanosleep(&nap, nullptr);
    }
}

bool Worker::ensure_memory(Slot& slot) {
    if (slot.memory) return true;
    // Aligned to 2 MiB so that a huge page can back it: one pin, one translation, instead of five hundred.
    constexpr size_t HUGE = 2 << 20;
    size_t nbytes = mover_.config().chunk_nbytes;
    void* map = mmap(nullptr, nbytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return false;
    auto begin = reinterpret_cast<uintptr_t>(map);
    uintptr_t aligned = (begin + HUGE - 1) / HUGE * HUGE;
    if (aligned > begin) munmap(map, aligned - begin);
    uintptr_t rest = begin + nbytes + HUGE - (aligned + nbytes);
    if (rest > 0) munmap(reinterpret_cast<void*>(aligned + nbytes), rest);
    slot.memory = reinterpret_cast<char*>(aligned);
    madvise(slot.memory, nbytes, MADV_HUGEPAGE);
    madvise(slot.memory, nbytes, MADV_DONTFORK);  // a forked child must not copy what a device may still write
    for (size_t at = 0; at < nbytes; at += 4096) static_cast<volatile char*>(slot.memory)[at] = 0;
    return true;
}

CUresult Worker::ensure_registered(Slot& slot) {
    if (slot.registered) return CUDA_SUCCESS;
    CUresult code =
        CudaDriver::get()->MemHostRegister(slot.memory, mover_.config().chunk_nbytes, CU_MEMHOSTREGISTER_PORTABLE);
    if (code == CUDA_SUCCESS) {
        slot.registered = true;
        mover_.pinned_nbytes += mover_.config().chunk_nbytes;
    }
    return code;
}

CUresult Worker::lane(int device, Lane** out) {
    const CudaDriver* cuda = CudaDriver::get();
    Lane& lane = lanes_[device];
    CUresult code = CUDA_SUCCESS;
    if (!lane.context) code = cuda->primary_context(device, &lane.context);
    if (code == CUDA_SUCCESS) code = cuda->CtxSetCurrent(lane.context);
    if (code == CUDA_SUCCESS && !lane.stream) code = mover_.copy_stream(device, index_, &lane.stream);
    while (code == CUDA_SUCCESS && lane.events.size() < slots_.size()) {
        CUevent event = nullptr;
        code = cuda->EventCreate(&event, CU_EVENT_DISABLE_TIMING);
        if (code == CUDA_SUCCESS) lane.events.push_back(event);
    }
    *out = &lane;
    return code;
}

void Worker::open_uring(Job& job) {
    if (uring_error_ == -1) {
        uring_error_ = uring_.open(static_cast<unsigned>(std::max<size_t>(slots_.size(), 2)));
        if (uring_error_ == 0) {
            std::vector<iovec> buffers;
            for (Slot& slot : slots_)
                if (ensure_memory(slot)) buffers.push_back({slot.memory, mover_.config().chunk_nbytes});
            if (buffers.size() == slots_.size()) uring_.register_buffers(buffers);
        }
    }
    if (uring_error_ != 0)
        job.refuse_uring();
    else if (!uring_.registered())
        job.note(XDS_NOTE_UNREGISTERED);
}

void Worker::start(Slot& slot) {
    Job& job = *slot.chunk.job;
    if (slot.chunk.prepare) return prepare(slot);
    if (slot.chunk.method == XDS_CUFILE) return read_cufile(slot);
    if (job.to_gpu() || slot.chunk.direct) {
        uint64_t begin = now_ns();
        bool made = slot.memory != nullptr && (slot.registered || !job.to_gpu());
        if (!ensure_memory(slot)) return fail_system(slot, ENOMEM, 0, mover_.config().chunk_nbytes);
        if (job.to_gpu()) {
            Lane* ignored = nullptr;
            CUresult code = lane(job.device(), &ignored);
            if (code != CUDA_SUCCESS) return fail_cuda(slot, code, "stream and events");
            code = ensure_registered(slot);
            if (code != CUDA_SUCCESS) return fail_cuda(slot, code, "pinning the staging ring");
        }
        if (!made) job.count_setup(now_ns() - begin);
    }
    slot.since_ns = now_ns();
    if (job.out())
        gather(slot);
    else if (slot.chunk.direct)
        read_direct(slot);
    else
        read_buffered(slot);
}

void Worker::prepare(Slot& slot) {
    std::shared_ptr<Job> job = slot.chunk.job;
    bool cufile = job->to_gpu() && !(job->limits().forbid & (1u << XDS_CUFILE));
    job->file(slot.chunk.file).prepare(cufile ? job->device() : -1);
    job->prepared(slot.chunk);
    recycle(slot);
    mover_.work_added(job);
}

void Worker::read_direct(Slot& slot) {
    Chunk& chunk = slot.chunk;
    Job& job = *chunk.job;
    int fd = job.file(chunk.file).direct_fd();
    bool by_uring = chunk.method == XDS_URING;
    if (by_uring) open_uring(job);
    auto index = static_cast<unsigned>(&slot - slots_.data());
    if (by_uring && uring_error_ == 0) {
        slot.state = Slot::State::reading;
        int code = uring_.read(fd, slot.memory, static_cast<unsigned>(chunk.read_nbytes), chunk.read_offset, index, index);
        if (code == 0) {
            ++reading_;
            return;
        }
        slot.state = Slot::State::free;  // the kernel did not take it: read here
    }
    chunk.method = XDS_DIRECT;
    ssize_t got;
    do {
        got = pread(fd, slot.memory, chunk.read_nbytes, static_cast<off_t>(chunk.read_offset));
    } while (got < 0 && errno == EINTR);
    finish_direct(slot, got < 0 ? -errno : got);
}

void Worker::finish_direct(Slot& slot, int64_t result) {
    slot.state = Slot::State::free;
    Chunk& chunk = slot.chunk;
    Job& job = *chunk.job;
    uint64_t commands = 1, retries = 0;
    uint64_t got = result > 0 ? static_cast<uint64_t>(result) : 0;
    if (result == -EINVAL || result == -EOPNOTSUPP) {
        // O_DIRECT opened, but this read is refused: the file system knows better.
        job.refuse_direct(chunk.file);
    } else if (result < 0 && result != -EAGAIN && result != -EINTR) {
        return fail_system(slot, static_cast<int>(-result), chunk.read_offset, chunk.needed_nbytes);
    }
    if (result < 0) chunk.method = XDS_BUFFERED;
    if (got < chunk.needed_nbytes) {
        // A short answer, or the unaligned tail of the file: the rest comes through the page cache, by absolute offset.
        ++retries;
        iovec rest{slot.memory + got, chunk.needed_nbytes - got};
        int64_t more = read_fully(job.file(chunk.file).fd(), chunk.read_offset + got, &rest, 1, &commands, &retries);
        if (more < 0) return fail_system(slot, static_cast<int>(-more), chunk.read_offset + got, chunk.needed_nbytes - got);
        got += static_cast<uint64_t>(more);
        if (got < chunk.needed_nbytes) return fail_short(slot, chunk.read_offset + got, chunk.needed_nbytes - got);
    }
    job.count(chunk, commands, retries, now_ns() - slot.since_ns);
    send(slot);
}

// The device writes the array itself: no slot, no copy. It knows no streams, so the thread waits for the caller's work.
void Worker::read_cufile(Slot& slot) {
    Chunk& chunk = slot.chunk;
    Job& job = *chunk.job;
    slot.since_ns = now_ns();
    Lane* lane_ = nullptr;
    CUresult code = lane(job.device(), &lane_);
    while (code == CUDA_SUCCESS && chunk.batch->after) {
        code = CudaDriver::get()->EventQuery(chunk.batch->after);
        if (code != CUDA_ERROR_NOT_READY) break;
        if (job.stopped()) return abandon(slot);
        timespec nap{0, 20'000};
        nanosleep(&nap, nullptr);
        code = CUDA_SUCCESS;
    }
    if (code != CUDA_SUCCESS) return fail_cuda(slot, code, "waiting for the stream");
    void* handle = job.file(chunk.file).cufile();
    uint64_t commands = 0, retries = 0;
    for (const Copy& copy : chunk.copies) {
        for (uint64_t done = 0; done < copy.nbytes;) {
            uint64_t offset = chunk.read_offset + copy.slot_offset + done;
            int64_t got = CuFile::get().read(handle, copy.destination + done, copy.nbytes - done, offset);
            ++commands;
            if (got == -EINTR || got == -EAGAIN) {
                ++retries;
                if (job.stopped()) return abandon(slot);
                continue;
            }
            if (got < 0) return fail_system(slot, static_cast<int>(-got), offset, copy.nbytes - done);
            if (got == 0) return fail_short(slot, offset, copy.nbytes - done);
            done += static_cast<uint64_t>(got);
            if (done < copy.nbytes) ++retries;
        }
    }
    job.count(chunk, commands, retries, now_ns() - slot.since_ns);
    finish(slot);
}

void Worker::read_buffered(Slot& slot) {
    Chunk& chunk = slot.chunk;
    Job& job = *chunk.job;
    SourceFile& file = job.file(chunk.file);
    uint64_t commands = 0, retries = 0;
    const char* base = job.to_gpu() ? slot.memory : nullptr;
    std::vector<iovec> iov;
    for (size_t first = 0; first < chunk.pieces.size();) {
        iov.clear();
        uint64_t nbytes = 0;
        size_t next = first;
        while (next < chunk.pieces.size() && chunk.pieces[next].offset == chunk.pieces[first].offset + nbytes) {
            const Piece& piece = chunk.pieces[next++];
            auto address = base ? reinterpret_cast<uint64_t>(base) + piece.position : piece.position;
            iov.push_back({reinterpret_cast<void*>(address), piece.nbytes});
            nbytes += piece.nbytes;
        }
        uint64_t offset = chunk.pieces[first].offset;
        int count = static_cast<int>(iov.size());
        int64_t got = 0;
        if (chunk.method == XDS_MAPPED) {
            got = copy_mapped(file.fd(), offset, iov.data(), count);
            ++commands;
            // Refused, or the file ended under it: reading says which, and where.
            if (got < static_cast<int64_t>(nbytes)) {
                if (got < 0) job.resident_chooser(chunk.file).refuse_mapped();
                chunk.method = XDS_PREAD;
            }
        }
        if (chunk.method != XDS_MAPPED) got = read_fully(file.fd(), offset, iov.data(), count, &commands, &retries);
        if (got < 0) return fail_system(slot, static_cast<int>(-got), offset, nbytes);
        auto read = static_cast<uint64_t>(got);
        if (read < nbytes) return fail_short(slot, offset + read, nbytes - read);
        first = next;
    }
    uint64_t spent = now_ns() - slot.since_ns;
    if (chunk.method <= XDS_MAPPED)
        job.resident_chooser(chunk.file).measured(chunk.method, chunk.nbytes, spent);
    job.count(chunk, commands, retries, spent);
    send(slot);
}

// The bytes are in the slot (or, for host arrays read through the page cache, already where they belong).
void Worker::send(Slot& slot) {
    Chunk& chunk = slot.chunk;
    Job& job = *chunk.job;
    if (!job.to_gpu()) {
        for (const Copy& copy : chunk.copies)
            std::memcpy(reinterpret_cast<void*>(copy.destination), slot.memory + copy.slot_offset, copy.nbytes);
        return finish(slot);
    }
    CUresult code = copy(slot);
    if (code != CUDA_SUCCESS) fail_cuda(slot, code, "copy of the GPU's memory");
}

// Puts the copies between slot and GPU on the stream, behind the caller's work, and an event behind them.
CUresult Worker::copy(Slot& slot) {
    Chunk& chunk = slot.chunk;
    Job& job = *chunk.job;
    const CudaDriver* cuda = CudaDriver::get();
    Lane* lane_ = nullptr;
    CUresult code = lane(job.device(), &lane_);
    if (code == CUDA_SUCCESS && chunk.batch->after && lane_->waited_batch != chunk.batch->serial) {
        code = cuda->StreamWaitEvent(lane_->stream, chunk.batch->after, 0);
        lane_->waited_batch = chunk.batch->serial;
    }
    bool under_way = false;
    for (const Copy& copy : chunk.copies) {
        if (code != CUDA_SUCCESS) break;
        char* host = slot.memory + copy.slot_offset;
        code = job.out() ? cuda->MemcpyDtoHAsync(host, copy.destination, copy.nbytes, lane_->stream)
                         : cuda->MemcpyHtoDAsync(copy.destination, host, copy.nbytes, lane_->stream);
        under_way |= code == CUDA_SUCCESS;
    }
    CUevent event = lane_->events.empty() ? nullptr : lane_->events[static_cast<size_t>(&slot - slots_.data())];
    if (code == CUDA_SUCCESS) code = cuda->EventRecord(event, lane_->stream);
    if (code == CUDA_SUCCESS) {
        slot.state = Slot::State::copying;
        slot.since_ns = now_ns();
        ++copying_;
    } else if (under_way && cuda->EventRecord(event, lane_->stream) == CUDA_SUCCESS) {
        // Some copies may be on their way: the memory is not given back before they are over.
        while (cuda->EventQuery(event) == CUDA_ERROR_NOT_READY) sched_yield();
    }
    return code;
}

// Memory to be written: into the slot where it must pass one, else straight on.
void Worker::gather(Slot& slot) {
    if (slot.chunk.job->to_gpu()) return send(slot);
    for (const Copy& copy : slot.chunk.copies)
        std::memcpy(slot.memory + copy.slot_offset, reinterpret_cast<const void*>(copy.destination), copy.nbytes);
    write_out(slot);
}

void Worker::write_out(Slot& slot) {
    slot.state = Slot::State::free;
    Chunk& chunk = slot.chunk;
    Job& job = *chunk.job;
    if (job.stopped()) return abandon(slot);
    SourceFile& file = job.file(chunk.file);
    uint64_t begin = now_ns(), commands = 0, retries = 0;
    bool staged = job.to_gpu() || chunk.direct;
    uint64_t offset = chunk.pieces.front().offset, nbytes = chunk.nbytes;
    std::vector<iovec> iov;
    auto write = [&](int fd, uint64_t at, uint64_t size) {  // staged bytes are one run of the slot
        iov.assign(1, {slot.memory + chunk.pieces.front().position + (at - offset), size});
        int64_t done = size ? write_fully(fd, at, iov.data(), 1, &commands, &retries) : 0;
        return done < 0 ? done : done == static_cast<int64_t>(size) ? 0 : -EIO;
    };
    int64_t code = 0;
    if (chunk.direct) {
        uint64_t first = std::min((offset + DIRECT_ALIGNMENT - 1) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT, offset + nbytes);
        uint64_t last = std::max(first, (offset + nbytes) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT);
        code = write(file.fd(), offset, first - offset);
        if (code == 0) code = write(file.direct_fd(), first, last - first);
        if (code == -EINVAL || code == -EOPNOTSUPP) {
            job.refuse_direct(chunk.file);
            chunk.method = XDS_BUFFERED;
            ++retries;
            code = write(file.fd(), first, last - first);
        }
        if (code == 0) code = write(file.fd(), last, offset + nbytes - last);
    } else {
        for (const Piece& piece : chunk.pieces) {
            auto address = staged ? reinterpret_cast<uint64_t>(slot.memory) + piece.position : piece.position;
            iov.push_back({reinterpret_cast<void*>(address), piece.nbytes});
        }
        int count = static_cast<int>(iov.size());
        int64_t done = 0;
        if (chunk.method == XDS_MAPPED) {
            done = copy_to_mapping(file.fd(), offset, iov.data(), count);
            ++commands;
            // Not mapped, or the file system is full: writing says which.
            if (done < static_cast<int64_t>(nbytes)) {
                if (done < 0) job.resident_chooser(chunk.file).refuse_mapped();
                chunk.method = XDS_PREAD;
            }
        }
        if (chunk.method != XDS_MAPPED) done = write_fully(file.fd(), offset, iov.data(), count, &commands, &retries);
        code = done < 0 ? done : done == static_cast<int64_t>(nbytes) ? 0 : -EIO;
    }
    if (code < 0) return fail_system(slot, static_cast<int>(-code), offset, nbytes);
    uint64_t spent = now_ns() - begin;
    if (chunk.method <= XDS_MAPPED) job.resident_chooser(chunk.file).measured(chunk.method, nbytes, spent);
    job.count(chunk, commands, retries, spent);
    finish(slot);
}

void Worker::recycle(Slot& slot) {
    slot.state = Slot::State::free;
    slot.chunk.batch = nullptr;
    slot.chunk.job.reset();
}

void Worker::finish(Slot& slot) {
    slot.chunk.job->landed(slot.chunk);
    recycle(slot);
}

// The job was stopped before this chunk had begun.
void Worker::abandon(Slot& slot) {
    slot.chunk.job->failed(slot.chunk, XDS_CANCELED, 0, 0, 0, "");
    recycle(slot);
}

void Worker::fail_system(Slot& slot, int code, uint64_t offset, uint64_t nbytes) {
    slot.chunk.job->failed(slot.chunk, XDS_SYSTEM, code, offset, nbytes, "");
    recycle(slot);
}

void Worker::fail_short(Slot& slot, uint64_t offset, uint64_t nbytes) {
    slot.chunk.job->failed(slot.chunk, XDS_SHORT_READ, 0, offset, nbytes, "");
    recycle(slot);
}

void Worker::fail_cuda(Slot& slot, CUresult code, const char* what) {
    std::string text = std::string(what) + ": " + CudaDriver::get()->describe(code);
    slot.chunk.job->failed(slot.chunk, XDS_CUDA, code, 0, slot.chunk.nbytes, text);
    recycle(slot);
}

void Worker::release() {
    uring_.close();
    const CudaDriver* cuda = lanes_.empty() ? nullptr : CudaDriver::get();
    for (auto& [device, lane] : lanes_) {
        if (!lane.context || cuda->CtxPushCurrent(lane.context) != CUDA_SUCCESS) continue;
        for (CUevent event : lane.events) cuda->EventDestroy(event);
        for (Slot& slot : slots_) {
            if (!slot.registered) continue;
            cuda->MemHostUnregister(slot.memory);
            slot.registered = false;
            mover_.pinned_nbytes -= mover_.config().chunk_nbytes;
        }
        CUcontext popped = nullptr;
        cuda->CtxPopCurrent(&popped);
    }
    for (Slot& slot : slots_)
        if (slot.memory) munmap(slot.memory, mover_.config().chunk_nbytes);
    slots_.clear();
    lanes_.clear();
}

// ---- all threads ---------------------------------------------------------------------------------------------------

Mover::Mover(const xds_mover_config& config) : config_(config) {}

void Mover::close() {
    constexpr std::chrono::seconds PATIENCE{5};
    std::vector<std::thread> threads;
    {
        std::unique_lock lock(mutex_);
        stopping_ = true;
        for (auto& job : jobs_) job->cancel();
        jobs_.clear();
        threads.swap(threads_);
        work_.notify_all();
        if (!ended_.wait_for(lock, PATIENCE, [this] { return running_ == 0; })) {
            left_ = shared_from_this();
            for (std::thread& thread : threads) thread.detach();
            return;
        }
    }
    for (std::thread& thread : threads) thread.join();
    free_all();
}

void Mover::thread_ended() {
    std::shared_ptr<Mover> self;  // goes after the lock has: it may be the last that holds the mutex
    std::lock_guard lock(mutex_);
    if (--running_ == 0) {
        self.swap(left_);
        ended_.notify_all();
    }
}

void Mover::free_all() {
    std::lock_guard lock(mutex_);
    for (auto& worker : workers_) worker->release();
    workers_.clear();
    for (auto& [key, stream] : streams_) {
        ContextScope scope(*CudaDriver::get(), key.first);
        if (stream && scope.code() == CUDA_SUCCESS) CudaDriver::get()->StreamDestroy(stream);
    }
    streams_.clear();
}

CUresult Mover::copy_stream(int device, uint32_t index, CUstream* stream) {
    std::lock_guard lock(streams_mutex_);
    CUstream& shared = streams_[{device, index % config_.streams}];
    CUresult code = shared ? CUDA_SUCCESS : CudaDriver::get()->StreamCreate(&shared, CU_STREAM_NON_BLOCKING);
    *stream = shared;
    return code;
}

std::shared_ptr<Job> Mover::create(std::vector<int> fds, int device, bool out, uint32_t forbid) {
    uint64_t in_flight = uint64_t{config_.threads} * config_.slots * config_.chunk_nbytes;
    Limits limits{config_.threads, config_.cpu_threads, config_.forbid | forbid, config_.chunk_nbytes, in_flight};
    auto job = std::make_shared<Job>(std::move(fds), device, out, limits, choosers_);
    std::lock_guard lock(mutex_);
    if (stopping_)
        job->cancel();
    else
        jobs_.push_back(job);
    return job;
}

void Mover::forget(const std::shared_ptr<Job>& job) {
    std::lock_guard lock(mutex_);
    std::erase(jobs_, job);
}

void Mover::work_added(const std::shared_ptr<Job>& job) {
    std::lock_guard lock(mutex_);
    ++version_;
    // As many threads as there is work for, up to what is allowed.
    uint64_t wanted = std::min<uint64_t>(config_.threads, job->unread_nbytes() / (256 << 10) + 1);
    while (!stopping_ && threads_.size() < wanted) {
        workers_.push_back(std::make_unique<Worker>(*this, static_cast<uint32_t>(workers_.size())));
        // Signals belong to the program's own threads.
        sigset_t all, old;
        sigfillset(&all);
        sigdelset(&all, SIGBUS);
        sigdelset(&all, SIGSEGV);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        int refused = 0;
        try {
            threads_.emplace_back([this, worker = workers_.back().get()] {
                worker->run();
                thread_ended();
            });
            ++running_;
            pthread_setname_np(threads_.back().native_handle(), "xds-mover");
        } catch (const std::system_error& error) {
            refused = error.code().value();
            workers_.pop_back();
        }
        pthread_sigmask(SIG_SETMASK, &old, nullptr);
        if (refused == 0) continue;
        // A limit on threads or memory: those that are there do it alone.
        if (threads_.empty()) job->refuse(refused);
        break;
    }
    work_.notify_all();
}

bool Mover::take(uint32_t index, Chunk* chunk, uint64_t* version) {
    std::lock_guard lock(mutex_);
    *version = version_;
    for (size_t i = 0; i < jobs_.size();) {
        size_t at = (turn_ + i) % jobs_.size();
        if (jobs_[at]->take(index, chunk)) {
            ++turn_;
            return true;
        }
        if (jobs_[at]->exhausted())
            jobs_.erase(jobs_.begin() + static_cast<std::ptrdiff_t>(at));
        else
            ++i;
    }
    return false;
}

void Mover::sleep(uint64_t version) {
    std::unique_lock lock(mutex_);
    work_.wait(lock, [&] { return stopping_.load() || version_ != version; });
}

}  // namespace xds

// ---- C ABI ---------------------------------------------------------------------------------------------------------

using xds::Job;
using xds::Mover;

namespace {
// A job as Python holds it; either may be given up first.
struct JobHandle {
    std::shared_ptr<Mover> mover;
    std::shared_ptr<Job> job;
};

using MoverHandle = std::shared_ptr<Mover>;
}  // namespace

XDS_API uint32_t xds_abi_version(void) { return 1; }

// Null where the configuration makes no sense.
XDS_API void* xds_mover_create(const xds_mover_config* config) {
    bool right = config->threads >= 1 && config->threads <= 64 && config->cpu_threads >= 1 && config->slots >= 1 &&
                 config->slots <= 64 && config->streams >= 1 && config->chunk_nbytes >= 4096 && config->chunk_nbytes % 4096 == 0;
    return right ? new MoverHandle(std::make_shared<Mover>(*config)) : nullptr;
}

XDS_API void xds_mover_destroy(void* mover) {
    auto* handle = static_cast<MoverHandle*>(mover);
    (*handle)->close();
    delete handle;
}

XDS_API uint64_t xds_mover_pinned_nbytes(void* mover) { return (*static_cast<MoverHandle*>(mover))->pinned_nbytes; }

// `device` is a CUDA ordinal, or -1 for host arrays. The descriptors stay the caller's, open until the job is drained.
// `forbid` adds to what the mover forbids.
// `out`: memory is written to the files, which are open for it and already as long as they will be.
XDS_API void* xds_job_create(void* mover, const int32_t* fds, uint32_t count, int32_t device, int32_t out,
                             uint32_t forbid) {
    if (device >= 0 && !xds::CudaDriver::get()) return nullptr;
    MoverHandle& m = *static_cast<MoverHandle*>(mover);
    return new JobHandle{m, m->create(std::vector<int>(fds, fds + count), device, out != 0, forbid)};
}

// The batch's number; or a negative xds_status, with the errno or CUresult in `code`.
XDS_API int64_t xds_job_add(void* handle, const xds_segment* segments, uint64_t count, int32_t ordered, uint64_t stream,
                            int32_t* code) {
    auto* h = static_cast<JobHandle*>(handle);
    int64_t batch = h->job->add(segments, count, ordered != 0, reinterpret_cast<xds::CUstream>(stream), code);
    if (batch >= 0) h->mover->work_added(h->job);
    return batch;
}

XDS_API void xds_job_seal(void* handle) { static_cast<JobHandle*>(handle)->job->seal(); }

// XDS_OK: sealed and all landed; XDS_PENDING: not yet; else how it failed. Nothing is in flight unless pending.
XDS_API int32_t xds_job_wait(void* handle, int64_t timeout_ns) {
    return static_cast<JobHandle*>(handle)->job->wait(timeout_ns);
}

// XDS_OK: the next batch that has landed; XDS_END: all were handed out; XDS_PENDING; else how it failed.
XDS_API int32_t xds_job_next_ready(void* handle, int64_t timeout_ns, uint64_t* batch) {
    return static_cast<JobHandle*>(handle)->job->next_ready(timeout_ns, batch);
}

// See Job::event_fd.
XDS_API int32_t xds_job_event_fd(void* handle) { return static_cast<JobHandle*>(handle)->job->event_fd(); }

// Stops handing out work; what is in flight still runs: wait for it.
XDS_API void xds_job_cancel(void* handle) { static_cast<JobHandle*>(handle)->job->cancel(); }
XDS_API int32_t xds_job_drained(void* handle) { return static_cast<JobHandle*>(handle)->job->drained(); }
XDS_API void xds_job_failure(void* handle, xds_failure* out) { static_cast<JobHandle*>(handle)->job->failure(out); }

XDS_API void xds_job_counters(void* handle, xds_counters* out) {
    auto* h = static_cast<JobHandle*>(handle);
    h->job->counters(out);
    out->pinned_nbytes = h->mover->pinned_nbytes;
}

XDS_API void xds_job_free(void* handle) {
    auto* h = static_cast<JobHandle*>(handle);
    h->job->cancel();
    h->mover->forget(h->job);
    delete h;
}
