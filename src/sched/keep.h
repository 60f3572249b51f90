// Which gaps are kept in memory.
#pragma once

#include <cstdint>
#include <vector>

#include "src/sched/gaps.h"
#include "src/sched/load.h"

namespace zinf::sched {

// Bytes at a position.
struct KeepLimits {
  std::int64_t all = 0;      // what is used there is among them
  std::int64_t leaving = 0;  // kept ones of states that leave
};

// Chooses gaps so that with them no position has more than the limits (or what
// is used there anyway), and few bytes are moved. By gap.
std::vector<bool> choose_kept(const Trace& trace, const Gaps& found,
                              const KeepLimits& limits, std::size_t num_states,
                              std::uint64_t request_bytes);

}  // namespace zinf::sched
