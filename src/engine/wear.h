// How fast a run uses up the drives that it writes to.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "zinf/host_tier.h"

namespace zinf {

// What drives are rated for when nobody says it: 0.3 of their size a day for 5
// years, as most client drives are (600 TB per TB). A path counts as a drive of
// its file system's size; paths on one file system are one drive.
std::uint64_t default_endurance(const std::vector<NvmePath>& paths);

// The rate is that between the ends of the first and the last step: the first
// one writes what the others only overwrite. One at a time.
class Wear {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Wear(std::uint64_t endurance_bytes) : endurance_(endurance_bytes) {}

  // A step has ended; so much was written since the beginning.
  void count_step(std::uint64_t bytes_written, Time now);
  WearStats stats() const;

 private:
  struct Moment {
    std::uint64_t bytes = 0;
    Time time;
  };
  const std::uint64_t endurance_;
  std::uint64_t steps_ = 0;
  Moment first_;
  Moment last_;
};

}  // namespace zinf
