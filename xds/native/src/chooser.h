// Which way to read is faster here: measured while reading, remembered for the process, a device and a kind each.
// Layer: native, below the job; includes nothing of CUDA.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>

#include "abi.h"

namespace xds {

// Both candidates cost CPU time of the thread that runs them, so the time of one chunk compares them.
class ResidentChooser {
  public:
    xds_method choose(uint32_t forbid);
    void measured(xds_method method, uint64_t nbytes, uint64_t ns);
    // The file system maps nothing: never ask again.
    void refuse_mapped();

  private:
    // The median of the last few: one chunk may pay for page faults of its destination or lose its CPU for a while.
    static constexpr unsigned TRIALS = 9;
    static constexpr unsigned LOOK_AGAIN = 64;  // every so many chunks the other way is tried once more
    struct Rate {
        double ns_per_byte[TRIALS] = {};
        unsigned trials = 0;
        double median() const;
    };
    std::mutex mutex_;
    Rate rates_[2];  // XDS_PREAD, XDS_MAPPED
    unsigned turn_ = 0;
    bool mapped_refused_ = false;
};

// Requests of a cold file wait for the device, in flight side by side, so only the rate of a whole stretch compares
// them: one stretch each, with a run-in that lets the one before drain.
class ColdChooser {
  public:
    // One of the candidates that `allowed` has (bits 1 << method). `in_flight_nbytes` is the most
    // that can be under way at once.
    xds_method choose(uint64_t nbytes, uint64_t in_flight_nbytes, uint32_t allowed);
    bool buffered_won();

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr uint64_t STRETCH_NBYTES = 64 << 20;
    static constexpr xds_method CANDIDATES[] = {XDS_CUFILE, XDS_URING, XDS_DIRECT, XDS_BUFFERED};
    xds_method best(uint32_t allowed) const;

    std::mutex mutex_;
    double rates_[XDS_METHOD_COUNT] = {};  // 0: not measured
    xds_method running_ = XDS_METHOD_COUNT;
    uint64_t handed_ = 0, begin_nbytes_ = 0;
    Clock::time_point begin_, last_;
    bool begun_ = false;
};

// All choosers of one mover, by device number and by what is at the other end: host arrays or a GPU's, read or written.
class Choosers {
  public:
    ResidentChooser& resident(dev_t device, bool gpu, bool out) { return find(resident_, device, gpu, out); }
    ColdChooser& cold(dev_t device, bool gpu) { return find(cold_, device, gpu, false); }

  private:
    template <typename Map>
    typename Map::mapped_type& find(Map& map, dev_t device, bool gpu, bool out) {
        std::lock_guard lock(mutex_);
        return map[{device, (gpu ? 1 : 0) + (out ? 2 : 0)}];  // a node of a map stays where it is
    }
    std::mutex mutex_;
    std::map<std::pair<dev_t, int>, ResidentChooser> resident_;
    std::map<std::pair<dev_t, int>, ColdChooser> cold_;
};

}  // namespace xds
