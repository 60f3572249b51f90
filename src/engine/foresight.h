// Tells a tier when its states are used next, so that who needs room takes it
// from what is used last: no choice reads less (Belady) where states are of one
// size. As a Mover without a plan: nothing is moved ahead of its use.
//
// Note [Settling]: a device computes later than the host says. What was used a
// moment ago is in use there for a while, and whoever took its memory would
// have to wait for that. So what was used last, up to so many bytes, goes last
// of all; in a training step it is what is used next anyway.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "src/base/mutex.h"
#include "zinf/residency.h"
#include "zinf/trace_book.h"

namespace zinf {

// Thread-safe.
class Foresight {
 public:
  // The residency must outlive it.
  Foresight(Residency& residency, std::uint64_t settling_bytes)
      : residency_(residency), settling_bytes_(settling_bytes) {}

  // States of so many bytes that are used at once, before they are pinned.
  // Passes without gradients have no end that anybody tells: one ends when what
  // it began with is used again, or something else begins.
  void use(std::span<const StateUse> at_once, std::uint64_t bytes,
           bool evaluates);
  void end_step();

 private:
  struct Position {
    std::vector<std::uint32_t> states;
    std::uint64_t bytes = 0;
  };

  void end_step_locked() ZINF_REQUIRES(mutex_);
  void settle(std::span<const StateUse> at_once, std::uint64_t bytes)
      ZINF_REQUIRES(mutex_);
  void tell_next_use(std::uint32_t state) ZINF_REQUIRES(mutex_);

  Residency& residency_;
  const std::uint64_t settling_bytes_;
  Mutex mutex_;
  TraceBook book_ ZINF_GUARDED_BY(mutex_);
  std::uint64_t now_ ZINF_GUARDED_BY(mutex_) = 0;    // positions ever announced
  std::uint64_t begin_ ZINF_GUARDED_BY(mutex_) = 0;  // of this step
  // What an evaluation began with.
  std::optional<std::uint32_t> evaluated_ ZINF_GUARDED_BY(mutex_);
  std::deque<Position> settling_ ZINF_GUARDED_BY(mutex_);
  std::uint64_t settling_now_bytes_ ZINF_GUARDED_BY(mutex_) = 0;
};

}  // namespace zinf
