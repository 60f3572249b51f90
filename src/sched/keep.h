// Which gaps are kept in memory.
#pragma once

#include <cstdint>
#include <vector>

#include "src/sched/gaps.h"
#include "src/sched/load.h"

namespace zinf::sched {

// Chooses gaps so that with them no position has more than `limit` bytes (or
// what is used there anyway), and few bytes are moved. By gap.
std::vector<bool> choose_kept(const Trace& trace, const Gaps& found,
                              std::int64_t limit, std::size_t num_states);

}  // namespace zinf::sched
