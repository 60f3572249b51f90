// The positions of a step, in the order in which a rank passes them, and the
// engine's plan for what goes to and from NVMe at each.
#pragma once

#include <cstdint>
#include <vector>

#include "zinf/plan.h"
#include "zinf/setup.h"
#include "zinf/status.h"

namespace zinf::plan {

enum class Work : std::uint8_t { kForward, kBackward, kUpdate };

struct Position {
  Work work = Work::kForward;
  std::uint32_t layer = 0;
  double share = 1;    // of the batch
  bool first = false;  // of the backward passes over its layer
  bool last = false;   // after it the gradient is complete
};

// Indices of a layer's states in a Trace; a layer may be a part of one: see
// parts().
struct StateIndex {
  std::uint32_t layers = 0;
  std::uint32_t weight(std::uint32_t layer) const { return layer; }
  std::uint32_t states(std::uint32_t layer) const { return layers + layer; }
  std::uint32_t grad(std::uint32_t layer) const { return 2 * layers + layer; }
  std::uint32_t size() const { return 3 * layers; }
};

struct Program {
  std::vector<Position> positions;
  StateIndex index;
};
Program make_program(const Setup& setup);

// Plans for the states that live on NVMe, of which the best counts; empty when
// none do. They depend on sizes and budgets only, not on any rate: so a slower
// lane never leads to a quicker plan.
Result<std::vector<Plan>> nvme_plans(const Setup& setup,
                                     const Program& program);

// Bytes of a rank's states, by index; 0 for those that are not on NVMe.
std::vector<PlanState> nvme_states(const Setup& setup, const Program& program);

}  // namespace zinf::plan
