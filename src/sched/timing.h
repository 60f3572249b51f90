// When the moves of a plan start.
#pragma once

#include <cstdint>
#include <vector>

#include "src/sched/gaps.h"

namespace zinf::sched {

// A gap in which the state is dropped `behind` positions after gap.first; its
// write starts `delay` positions after that, its read `ahead` positions before
// the use after it.
struct Dropped {
  std::uint32_t gap = 0;
  std::uint32_t delay = 0;  // at most `behind`
  std::uint32_t behind = 0;
  std::uint32_t ahead = 0;
  bool writes = false;
};

// All gaps with content that are not kept.
std::vector<Dropped> time_moves(const Gaps& found,
                                const std::vector<bool>& kept,
                                const PlanInput& input);

}  // namespace zinf::sched
