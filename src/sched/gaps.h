// The gaps of a trace: from each use of a state to its next.
#pragma once

#include <cstdint>
#include <vector>

#include "zinf/plan.h"
#include "zinf/status.h"
#include "zinf/trace.h"

namespace zinf::sched {

// In a gap a state is kept in memory, or dropped and fetched again.
struct Gap {
  std::uint32_t state = 0;
  // The positions where keeping it takes memory: [first, first + length) on the
  // circle. The position of a kFree is among them, that of other uses is not.
  std::uint32_t first = 0;
  std::uint32_t length = 0;
  std::uint64_t bytes = 0;
  bool holds = false;    // there is content, and it may be dropped
  bool dirties = false;  // the use before makes the content new
  bool reads = false;    // the use after needs the content
  bool ends = false;     // the use after makes it new again, or frees it
  bool leaves = false;   // see PlanState

  // What keeping saves, in multiples of `bytes`: the read of the next use, and
  // the write of new content that nobody will want once it has ended.
  int saves(bool dirty) const {
    return holds ? int{reads} + int{dirty && ends} : 0;
  }
};

// Gap i follows use i of the trace.
struct Gaps {
  std::vector<Gap> gaps;
  // In memory whatever is kept: states in use, those that stay, and what others
  // take.
  std::vector<std::int64_t> used_bytes;  // by position
};

// Of all states together: sums and differences of bytes stay in 64 bits.
inline constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 62;

// kInvalid for a state that is not in input.states, compute times or taken
// bytes of another number of positions, bandwidths that are not positive, more
// than kMostBytes.
Status check_input(const Trace& trace, const PlanInput& input);

// The input was checked.
Gaps find_gaps(const Trace& trace, const PlanInput& input);

// Bytes moved in a step of the steady state.
struct Traffic {
  std::uint64_t read = 0;
  std::uint64_t written = 0;
  std::vector<bool> writes;  // by gap: dropped with new content
  std::vector<bool> saving;  // by gap: kept, and that saves something
};
Traffic traffic(const std::vector<Gap>& gaps, const std::vector<bool>& kept,
                std::size_t num_states);

}  // namespace zinf::sched
