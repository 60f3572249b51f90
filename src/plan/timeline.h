// Tasks on the lanes of one rank: when each begins and ends.
//
// A lane serves its tasks one after the other, in the order in which they are
// issued. So a task's times follow from those before it, and one pass over the
// tasks is the whole simulation of events. Times are sums and maxima of
// durations: a longer task never makes another one end earlier.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>

#include "zinf/step_forecast.h"

namespace zinf::plan {

// A moment in seconds from the begin; 0 when there is nothing to wait for.
using Moment = double;

// One thread.
class Timeline {
 public:
  // Issues a task that waits for these moments. Returns its end.
  Moment add(Lane lane, double seconds, std::initializer_list<Moment> after) {
    Moment& free = free_[index(lane)];
    Moment begin = free;
    for (const Moment one : after) begin = std::max(begin, one);
    free = begin + seconds;
    busy_[index(lane)] += seconds;
    end_ = std::max(end_, free);
    return free;
  }

  // The lane does nothing before that.
  void hold(Lane lane, Moment until) {
    free_[index(lane)] = std::max(free_[index(lane)], until);
    end_ = std::max(end_, until);
  }

  Moment end() const { return end_; }  // of all tasks
  double busy(Lane lane) const { return busy_[index(lane)]; }

 private:
  static std::size_t index(Lane lane) { return static_cast<std::size_t>(lane); }

  std::array<Moment, kLanes> free_{};
  std::array<double, kLanes> busy_{};
  Moment end_ = 0;
};

}  // namespace zinf::plan
