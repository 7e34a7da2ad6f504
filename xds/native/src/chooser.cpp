// Which way to read is faster here. Layer: native, below the job.
#include "chooser.h"

#include <algorithm>
#include <iterator>

namespace xds {

xds_method ResidentChooser::choose(uint32_t forbid) {
    if (forbid & (1u << XDS_MAPPED)) return XDS_PREAD;
    if (forbid & (1u << XDS_PREAD)) return XDS_MAPPED;
    std::lock_guard lock(mutex_);
    if (mapped_refused_) return XDS_PREAD;
    unsigned turn = turn_++;
    // In runs of four: two chunks of one file side by side share page-cache locks with their own kind.
    if (rates_[XDS_PREAD].trials < TRIALS || rates_[XDS_MAPPED].trials < TRIALS)
        return (turn / 4) % 2 ? XDS_MAPPED : XDS_PREAD;
    bool mapped = rates_[XDS_MAPPED].median() < rates_[XDS_PREAD].median();
    return mapped != (turn % LOOK_AGAIN == 0) ? XDS_MAPPED : XDS_PREAD;
}

double ResidentChooser::Rate::median() const {
    double sorted[TRIALS];
    std::copy(std::begin(ns_per_byte), std::end(ns_per_byte), sorted);
    std::nth_element(sorted, sorted + TRIALS / 2, sorted + TRIALS);
    return sorted[TRIALS / 2];
}

void ResidentChooser::measured(xds_method method, uint64_t nbytes, uint64_t ns) {
    if (method > XDS_MAPPED || nbytes < (256u << 10)) return;
    std::lock_guard lock(mutex_);
    Rate& rate = rates_[method];
    rate.ns_per_byte[rate.trials++ % TRIALS] = static_cast<double>(ns) / static_cast<double>(nbytes);
}

void ResidentChooser::refuse_mapped() {
    std::lock_guard lock(mutex_);
    mapped_refused_ = true;
}

xds_method ColdChooser::best(uint32_t allowed) const {
    xds_method best = XDS_METHOD_COUNT;
    for (xds_method candidate : CANDIDATES) {
        if (!(allowed & (1u << candidate))) continue;
        if (best == XDS_METHOD_COUNT || rates_[candidate] > rates_[best]) best = candidate;
    }
    return best == XDS_METHOD_COUNT ? XDS_BUFFERED : best;
}

xds_method ColdChooser::choose(uint64_t nbytes, uint64_t in_flight_nbytes, uint32_t allowed) {
    std::lock_guard lock(mutex_);
    auto now = Clock::now();
    if (handed_ > 0 && now - last_ > std::chrono::milliseconds(500)) {
        // Nobody asked for a while: what was measured so far holds an idle time.
        handed_ = 0;
        begun_ = false;
    }
    last_ = now;
    if (running_ != XDS_METHOD_COUNT) {
        if (!begun_ && handed_ >= in_flight_nbytes) {
            begun_ = true;
            begin_ = now;
            begin_nbytes_ = handed_;
        }
        if (begun_ && handed_ - begin_nbytes_ >= STRETCH_NBYTES) {
            double seconds = std::chrono::duration<double>(now - begin_).count();
            rates_[running_] = static_cast<double>(handed_ - begin_nbytes_) / std::max(seconds, 1e-9);
            running_ = XDS_METHOD_COUNT;
        }
    }
    if (running_ == XDS_METHOD_COUNT || !(allowed & (1u << running_))) {
        handed_ = 0;
        begun_ = false;
        running_ = XDS_METHOD_COUNT;
        for (xds_method candidate : CANDIDATES) {
            if ((allowed & (1u << candidate)) && rates_[candidate] == 0) {
                running_ = candidate;
                break;
            }
        }
        if (running_ == XDS_METHOD_COUNT) return best(allowed);
    }
    handed_ += nbytes;
    return running_;
}

bool ColdChooser::buffered_won() {
    std::lock_guard lock(mutex_);
    return running_ == XDS_METHOD_COUNT && best(~0u) == XDS_BUFFERED;
}

}  // namespace xds
