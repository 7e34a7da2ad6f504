// One transfer: batches of segments cut into chunks, and the account of what has landed. Layer: native.
#include "job.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace xds {
namespace {

constexpr uint64_t GAP_LIMIT = 4096;          // padding between two segments that may be overwritten
constexpr size_t PIECE_LIMIT = 512;           // under IOV_MAX, and bounded work under the lock
constexpr uint64_t SMALLEST_CHUNK = 256 << 10;
constexpr int SAMPLES = 16;
constexpr double RESIDENT_SHARE = 0.5;        // from here on the page cache wins even where the rest is cold

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint64_t next_random(uint64_t* state) {  // xorshift64
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

std::atomic<uint64_t> batch_serial{1};

}  // namespace

Job::Job(std::vector<int> fds, int device, bool out, Limits limits, Choosers& choosers)
    : device_(device),
      out_(out),
      limits_(limits),
      choosers_(choosers),
      stages_(fds.size(), Stage::fresh),
      direct_refused_(fds.size(), 0),
      random_(static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) | 1) {
    for (int fd : fds) files_.push_back(std::make_unique<SourceFile>(fd, out));
}

Job::~Job() {
    if (event_fd_ >= 0) ::close(event_fd_);
    const CudaDriver* cuda = to_gpu() ? CudaDriver::get() : nullptr;
    if (!cuda) return;
    ContextScope scope(*cuda, device_);
    for (Batch& batch : batches_)
        if (batch.after) cuda->EventDestroy(batch.after);
}

int64_t Job::add(const xds_segment* segments, uint64_t count, bool ordered, CUstream stream, int32_t* code) {
    Batch batch;
    batch.segments.assign(segments, segments + count);
    batch.serial = batch_serial++;
    for (const xds_segment& s : batch.segments) {
        // Refused whole: nothing of the batch moves.
        if (s.file >= files_.size() || s.offset > INT64_MAX || s.nbytes > INT64_MAX - s.offset) {
            *code = EINVAL;
            return -XDS_SYSTEM;
        }
        batch.nbytes += s.nbytes;
    }
    if (ordered && to_gpu()) {
        const CudaDriver* cuda = CudaDriver::get();
        ContextScope scope(*cuda, device_);
        CUresult result = scope.code();
        if (result == CUDA_SUCCESS) result = cuda->EventCreate(&batch.after, CU_EVENT_DISABLE_TIMING);
        if (result == CUDA_SUCCESS) result = cuda->EventRecord(batch.after, stream);
        if (result != CUDA_SUCCESS) {
            if (batch.after) cuda->EventDestroy(batch.after);
            *code = result;
            return -XDS_CUDA;
        }
    }
    std::lock_guard lock(mutex_);
    if (stopped_ || sealed_) {
        if (batch.after) {
            const CudaDriver* cuda = CudaDriver::get();
            ContextScope scope(*cuda, device_);
            cuda->EventDestroy(batch.after);
        }
        *code = ECANCELED;
        return -XDS_CANCELED;
    }
    total_nbytes_ += batch.nbytes;
    batch.number = batches_.size();
    batches_.push_back(std::move(batch));
    if (batches_.back().nbytes == 0) {
        ready_.push_back(batches_.back().number);
        changed_.notify_all();
    }
    return static_cast<int64_t>(batches_.back().number);
}

void Job::seal() {
    std::lock_guard lock(mutex_);
    sealed_ = true;
    changed_locked();
}

void Job::changed_locked() {
    changed_.notify_all();
    if (event_fd_ >= 0 && over_locked()) {
        uint64_t one = 1;
        (void)!write(event_fd_, &one, sizeof one);
    }
}

int Job::event_fd() {
    std::lock_guard lock(mutex_);
    if (event_fd_ < 0) {
        event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (event_fd_ < 0) return -errno;
        changed_locked();  // it may be over already
    }
    return event_fd_;
}

void Job::skip_finished() {
    while (batch_ < batches_.size()) {
        const auto& segments = batches_[batch_].segments;
        while (segment_ < segments.size() && consumed_ == segments[segment_].nbytes) {
            ++segment_;
            consumed_ = 0;
        }
        if (segment_ < segments.size()) return;
        ++batch_;
        segment_ = 0;
    }
}

void Job::consume(uint64_t nbytes) {
    consumed_ += nbytes;
    if (consumed_ == batches_[batch_].segments[segment_].nbytes) {
        ++segment_;
        consumed_ = 0;
    }
}

// What part of this file's bytes in this batch is in the page cache: asked at random places, so that a page that an
// earlier question brought in does not answer for its neighbours.
void Job::decide() {
    const auto& segments = batches_[batch_].segments;
    uint32_t index = segments[segment_].file;
    if (decided_batch_ == batch_ && decided_file_ == index) return;
    decided_batch_ = batch_;
    decided_file_ = index;
    SourceFile& source = *files_[index];
    constexpr uint32_t CACHED = (1u << XDS_PREAD) | (1u << XDS_MAPPED);
    if ((limits_.forbid & CACHED) == CACHED) {  // only the device itself will do
        kind_ = Kind::cold;
        return;
    }
    if (source.storage() == Storage::memory) {
        kind_ = Kind::resident;
        return;
    }
    if (out_) {  // what the page cache holds does not matter
        kind_ = source.storage() == Storage::network ? Kind::network : Kind::cold;
        return;
    }
    size_t last = segment_;
    uint64_t nbytes = segments[segment_].nbytes - consumed_;
    while (last + 1 < segments.size() && segments[last + 1].file == index) nbytes += segments[++last].nbytes;
    auto samples = static_cast<int>(std::clamp<uint64_t>(nbytes >> 17, 1, SAMPLES));
    // One page a question: read-ahead would make the answer true for what follows.
    posix_fadvise(source.fd(), 0, 0, POSIX_FADV_RANDOM);
    int asked = 0, found = 0;
    for (int i = 0; i < samples; ++i) {
        size_t at = segment_ + (last - segment_) * static_cast<size_t>(i) / static_cast<size_t>(samples);
        const xds_segment& s = segments[at];
        if (s.nbytes == 0) continue;
        // Stratified within one large segment, anywhere within one of many.
        uint64_t share = segment_ == last ? s.nbytes / static_cast<uint64_t>(samples) : s.nbytes;
        uint64_t base = segment_ == last ? share * static_cast<uint64_t>(i) : 0;
        int answer = source.resident(s.offset + base + next_random(&random_) % std::max<uint64_t>(share, 1));
        if (answer < 0) {
            counters_.notes |= XDS_NOTE_NO_NOWAIT;
            break;
        }
        ++asked;
        found += answer;
    }
    posix_fadvise(source.fd(), 0, 0, POSIX_FADV_SEQUENTIAL);
    counters_.samples += static_cast<uint64_t>(asked);
    counters_.samples_resident += static_cast<uint64_t>(found);
    if (asked > 0 && found >= RESIDENT_SHARE * asked) {
        kind_ = Kind::resident;
    } else if (source.storage() == Storage::network || asked == 0) {
        kind_ = Kind::network;
        if (source.storage() == Storage::network) counters_.notes |= XDS_NOTE_NETWORK;
    } else {
        kind_ = Kind::cold;
    }
}

bool Job::take(uint32_t index, Chunk* chunk) {
    std::lock_guard lock(mutex_);
    if (stopped_) return false;
    skip_finished();
    if (batch_ >= batches_.size()) return false;
    chunk->batch = &batches_[batch_];
    chunk->file = chunk->batch->segments[segment_].file;
    chunk->prepare = stages_[chunk->file] == Stage::fresh;
    if (chunk->prepare) {
        // A dead file system may block whoever asks it: that thread, but none who waits for the job's lock.
        stages_[chunk->file] = Stage::preparing;
        chunk->job = shared_from_this();
        ++in_flight_;
        return true;
    }
    if (stages_[chunk->file] == Stage::preparing) return false;
    decide();
    if (kind_ == Kind::resident && index >= limits_.cpu_threads) return false;
    chunk->job = shared_from_this();
    chunk->direct = false;
    chunk->nbytes = 0;
    chunk->pieces.clear();
    chunk->copies.clear();
    SourceFile& source = *files_[chunk->file];
    if (out_) {
        build_out(chunk);
        ++in_flight_;
        thread_mask_ |= uint64_t{1} << (index % 64);
        return true;
    }
    if (kind_ == Kind::cold && !direct_refused_[chunk->file]) {
        constexpr uint32_t ALL_DIRECT = (1u << XDS_URING) | (1u << XDS_DIRECT) | (1u << XDS_CUFILE);
        uint32_t allowed = ((1u << XDS_URING) | (1u << XDS_DIRECT) | (1u << XDS_BUFFERED)) & ~limits_.forbid;
        if (uring_refused_) allowed &= ~(1u << XDS_URING);
        if (source.cufile()) allowed |= 1u << XDS_CUFILE;
        if (source.cufile_unproved()) counters_.notes |= XDS_NOTE_CUFILE_UNPROVED;
        if ((allowed & ALL_DIRECT) && source.direct_fd() < 0) {
            counters_.notes |= XDS_NOTE_DIRECT_REFUSED;
            direct_refused_[chunk->file] = 1;
        } else {
            ColdChooser& chooser = choosers_.cold(source.device(), to_gpu());
            uint64_t likely = std::min(limits_.slot_nbytes, chunk->batch->segments[segment_].nbytes - consumed_);
            chunk->method = chooser.choose(likely, limits_.in_flight_nbytes, allowed);
            chunk->direct = chunk->method != XDS_BUFFERED;
            if (!chunk->direct && chooser.buffered_won()) counters_.notes |= XDS_NOTE_BUFFERED_FASTER;
        }
    }
    if (chunk->direct) {
        build_direct(chunk);
    } else {
        chunk->method = XDS_BUFFERED;
        if (kind_ == Kind::resident)
            chunk->method = resident_chooser(chunk->file).choose(limits_.forbid);
        build_buffered(chunk);
    }
    ++in_flight_;
    thread_mask_ |= uint64_t{1} << (index % 64);
    return true;
}

// One run of the file. Written with O_DIRECT it passes a slot, at a place that is to a page what the offset is, so that
// whole pages of the file are whole pages of the slot.
void Job::build_out(Chunk* chunk) {
    Batch& batch = *chunk->batch;
    SourceFile& target = *files_[chunk->file];
    if (kind_ == Kind::resident) {
        chunk->method = resident_chooser(chunk->file).choose(limits_.forbid);
    } else {
        bool may_direct = kind_ == Kind::cold && !(limits_.forbid & (1u << XDS_DIRECT)) && !direct_refused_[chunk->file];
        if (may_direct && target.direct_fd() < 0) counters_.notes |= XDS_NOTE_DIRECT_REFUSED;
        chunk->direct = may_direct && target.direct_fd() >= 0;
        chunk->method = chunk->direct ? XDS_DIRECT : XDS_BUFFERED;
    }
    bool staged = to_gpu() || chunk->direct;
    uint32_t threads = kind_ == Kind::resident ? limits_.cpu_threads : limits_.threads;
    uint64_t limit = round_up(batch.nbytes / (2 * threads), 64 << 10);
    limit = std::clamp(limit, std::min(SMALLEST_CHUNK, limits_.slot_nbytes), limits_.slot_nbytes);
    uint64_t used = chunk->direct ? (batch.segments[segment_].offset + consumed_) % DIRECT_ALIGNMENT : 0;
    while (segment_ < batch.segments.size() && chunk->pieces.size() < PIECE_LIMIT && used < limit) {
        const xds_segment& s = batch.segments[segment_];
        if (s.nbytes == 0) {
            ++segment_;
            continue;
        }
        uint64_t offset = s.offset + consumed_, memory = s.destination + consumed_;
        bool apart = !chunk->pieces.empty() && chunk->pieces.back().offset + chunk->pieces.back().nbytes != offset;
        if (s.file != chunk->file || apart) break;
        uint64_t nbytes = std::min(s.nbytes - consumed_, limit - used);
        chunk->pieces.push_back({offset, nbytes, staged ? used : memory});
        if (staged) {
            Copy* last = chunk->copies.empty() ? nullptr : &chunk->copies.back();
            if (last && last->destination + last->nbytes == memory)
                last->nbytes += nbytes;
            else
                chunk->copies.push_back({used, memory, nbytes});
        }
        chunk->nbytes += nbytes;
        used += nbytes;
        consume(nbytes);
    }
}

void Job::build_buffered(Chunk* chunk) {
    Batch& batch = *chunk->batch;
    uint64_t target = round_up(batch.nbytes / (2 * (kind_ == Kind::resident ? limits_.cpu_threads : limits_.threads)), 64 << 10);
    target = std::clamp(target, std::min(SMALLEST_CHUNK, limits_.slot_nbytes), limits_.slot_nbytes);
    uint64_t used = 0;  // slot bytes
    while (segment_ < batch.segments.size() && chunk->pieces.size() < PIECE_LIMIT) {
        const xds_segment& s = batch.segments[segment_];
        if (s.nbytes == 0) {
            ++segment_;
            continue;
        }
        if (s.file != chunk->file) break;
        uint64_t offset = s.offset + consumed_, destination = s.destination + consumed_;
        bool apart = !chunk->pieces.empty() && chunk->pieces.back().offset + chunk->pieces.back().nbytes != offset;
        // Far-off pages of a slow file system are asked for side by side, not one after the other.
        if (apart && kind_ != Kind::resident) break;
        uint64_t position = 0;
        if (!to_gpu()) {
            if (used >= target) break;
            position = destination;
        } else if (chunk->copies.empty()) {
            chunk->copies.push_back({0, destination, 0});
        } else {
            Copy& copy = chunk->copies.back();
            uint64_t end = copy.destination + copy.nbytes;
            uint64_t gap = destination - end;  // wraps to something large where it lies before
            bool joins = gap == 0 || (gap < GAP_LIMIT && consumed_ == 0 && (s.flags & XDS_GAP_WRITABLE));
            if (joins) {
                if (used + gap >= target) break;
                used += gap;
                copy.nbytes += gap;
            } else {
                used = round_up(used, 64);
                if (used >= target) break;
                chunk->copies.push_back({used, destination, 0});
            }
        }
        uint64_t nbytes = std::min(s.nbytes - consumed_, target - used);
        if (nbytes == 0) break;
        if (to_gpu()) {
            position = used;
            chunk->copies.back().nbytes += nbytes;
        }
        chunk->pieces.push_back({offset, nbytes, position});
        chunk->nbytes += nbytes;
        used += nbytes;
        consume(nbytes);
    }
}

void Job::build_direct(Chunk* chunk) {
    Batch& batch = *chunk->batch;
    const xds_segment& first = batch.segments[segment_];
    uint64_t begin = (first.offset + consumed_) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
    uint64_t limit = begin + limits_.slot_nbytes;
    uint64_t end = first.offset + consumed_;
    while (segment_ < batch.segments.size() && chunk->copies.size() < PIECE_LIMIT) {
        const xds_segment& s = batch.segments[segment_];
        if (s.nbytes == 0) {
            ++segment_;
            continue;
        }
        uint64_t offset = s.offset + consumed_, destination = s.destination + consumed_;
        if (s.file != chunk->file || offset < end || offset - end >= DIRECT_ALIGNMENT || offset >= limit) break;
        uint64_t nbytes = std::min(s.nbytes - consumed_, limit - offset);
        Copy* last = chunk->copies.empty() ? nullptr : &chunk->copies.back();
        if (last && last->destination + last->nbytes == destination && last->slot_offset + last->nbytes == offset - begin)
            last->nbytes += nbytes;
        else
            chunk->copies.push_back({offset - begin, destination, nbytes});
        chunk->nbytes += nbytes;
        end = offset + nbytes;
        consume(nbytes);
    }
    chunk->read_offset = begin;
    chunk->needed_nbytes = end - begin;
    chunk->read_nbytes = round_up(end, DIRECT_ALIGNMENT) - begin;
}

void Job::prepared(const Chunk& chunk) {
    std::lock_guard lock(mutex_);
    --in_flight_;
    stages_[chunk.file] = Stage::ready;
    changed_locked();
}

void Job::landed(const Chunk& chunk) {
    std::lock_guard lock(mutex_);
    --in_flight_;
    counters_.landed_nbytes += chunk.nbytes;
    counters_.method_nbytes[chunk.method] += chunk.nbytes;
    chunk.batch->landed += chunk.nbytes;
    if (chunk.batch->landed == chunk.batch->nbytes && !stopped_) ready_.push_back(chunk.batch->number);
    changed_locked();
}

void Job::stop_locked(xds_status status) {
    if (!stopped_) failure_.status = status;
    stopped_ = true;
    changed_locked();
}

void Job::failed(const Chunk& chunk, xds_status status, int code, uint64_t offset, uint64_t nbytes, std::string text) {
    std::lock_guard lock(mutex_);
    --in_flight_;
    if (!stopped_) {
        failure_.code = code;
        failure_.file = chunk.file;
        failure_.offset = offset;
        failure_.nbytes = nbytes;
        std::strncpy(failure_.text, text.c_str(), sizeof failure_.text - 1);
    }
    stop_locked(status);
}

void Job::cancel() {
    std::lock_guard lock(mutex_);
    bool finished = sealed_ && counters_.landed_nbytes == total_nbytes_ && in_flight_ == 0;
    if (!finished) stop_locked(XDS_CANCELED);
}

void Job::refuse(int code) {
    std::lock_guard lock(mutex_);
    if (!stopped_) failure_.code = code;
    stop_locked(XDS_SYSTEM);
}

xds_status Job::wait(int64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return over_locked(); }))
        return XDS_PENDING;
    return stopped_ ? static_cast<xds_status>(failure_.status) : XDS_OK;
}

xds_status Job::next_ready(int64_t timeout_ns, uint64_t* batch) {
    std::unique_lock lock(mutex_);
    auto over = [this] { return !ready_.empty() || stopped_ || (sealed_ && handed_ready_ == batches_.size()); };
    if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), over)) return XDS_PENDING;
    if (stopped_) return static_cast<xds_status>(failure_.status);
    if (ready_.empty()) return XDS_END;
    *batch = ready_.front();
    ready_.pop_front();
    ++handed_ready_;
    return XDS_OK;
}

bool Job::drained() {
    std::lock_guard lock(mutex_);
    return over_locked();
}

bool Job::stopped() {
    std::lock_guard lock(mutex_);
    return stopped_;
}

bool Job::exhausted() {
    std::lock_guard lock(mutex_);
    if (stopped_) return true;
    skip_finished();
    return sealed_ && batch_ >= batches_.size();
}

uint64_t Job::unread_nbytes() {
    std::lock_guard lock(mutex_);
    return stopped_ ? 0 : total_nbytes_ - counters_.landed_nbytes;
}

void Job::failure(xds_failure* out) {
    std::lock_guard lock(mutex_);
    *out = failure_;
}

void Job::counters(xds_counters* out) {
    std::lock_guard lock(mutex_);
    *out = counters_;
    out->threads = static_cast<uint64_t>(std::popcount(thread_mask_));
}

void Job::count(const Chunk&, uint64_t commands, uint64_t retries, uint64_t read_ns) {
    std::lock_guard lock(mutex_);
    counters_.commands += commands;
    counters_.retries += retries;
    counters_.read_ns += read_ns;
}

void Job::count_copy(uint64_t ns) {
    std::lock_guard lock(mutex_);
    counters_.copy_ns += ns;
}

void Job::count_setup(uint64_t ns) {
    std::lock_guard lock(mutex_);
    counters_.setup_ns += ns;
}

void Job::note(uint64_t bits) {
    std::lock_guard lock(mutex_);
    counters_.notes |= bits;
}

void Job::refuse_uring() {
    std::lock_guard lock(mutex_);
    uring_refused_ = true;
    counters_.notes |= XDS_NOTE_URING_DENIED;
}

void Job::refuse_direct(uint32_t file) {
    std::lock_guard lock(mutex_);
    direct_refused_[file] = 1;
    counters_.notes |= XDS_NOTE_DIRECT_REFUSED;
}

}  // namespace xds
