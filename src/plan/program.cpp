#include "src/plan/program.h"

#include <algorithm>
#include <array>
#include <utility>

#include "src/plan/constants.h"

namespace zinf::plan {
namespace {

void add_forward(Program& program, double share) {
  for (std::uint32_t layer = 0; layer < program.index.layers; ++layer)
    program.positions.push_back({Work::kForward, layer, share});
}

void add_backward(const Setup& setup, Program& program, std::uint64_t pass,
                  std::uint64_t passes) {
  const bool last = pass + 1 == passes;
  for (std::uint32_t layer = program.index.layers; layer-- > 0;) {
    program.positions.push_back(
        {Work::kBackward, layer, 1 / double(passes), pass == 0, last});
    if (last && setup.mechanisms.update_in_backward)
      program.positions.push_back({Work::kUpdate, layer});
  }
}

// An update inside backward finds the weight there; a later one makes it from
// the master.
UseKind weight_use(const Setup& setup, const Position& position) {
  if (position.work != Work::kUpdate) return UseKind::kRead;
  return setup.mechanisms.update_in_backward ? UseKind::kChange
                                             : UseKind::kReplace;
}

UseKind grad_use(const Position& position) {
  if (position.work == Work::kUpdate) return UseKind::kRead;
  return position.first ? UseKind::kReplace : UseKind::kChange;
}

Trace make_trace(const Setup& setup, const Program& program) {
  const Placement& at = setup.placement;
  const StateIndex& index = program.index;
  const bool kept_grads = at.grads == Tier::kNvme && keeps_grads(setup);
  Trace trace;
  for (const Position& position : program.positions) {
    std::vector<StateUse> uses;
    const std::uint32_t layer = position.layer;
    if (at.weights == Tier::kNvme)
      uses.push_back({index.weight(layer), weight_use(setup, position)});
    if (at.states == Tier::kNvme && position.work == Work::kUpdate)
      uses.push_back({index.states(layer), UseKind::kChange});
    if (kept_grads && position.work != Work::kForward)
      uses.push_back({index.grad(layer), grad_use(position)});
    trace.add(uses);
  }
  return trace;
}

// What the states on NVMe may take of host memory.
std::uint64_t state_budget(const Setup& setup) {
  const Footprint taken = footprint(setup);
  const double moving = moving_bytes(taken);
  const double used = taken.on(Tier::kHost) - moving;
  if (!setup.mechanisms.keep) return static_cast<std::uint64_t>(moving);
  const double left = capacity(setup.cluster, Tier::kHost) - used;
  return static_cast<std::uint64_t>(std::max(0.0, left));
}

}  // namespace

Program make_program(const Setup& setup) {
  Program program;
  program.index.layers = static_cast<std::uint32_t>(parts(setup));
  const std::uint64_t passes =
      setup.mechanisms.vertical ? 1 : setup.micro_batches;
  for (std::uint64_t pass = 0; pass < passes; ++pass) {
    add_forward(program, 1 / double(passes));
    add_backward(setup, program, pass, passes);
  }
  if (!setup.mechanisms.update_in_backward) {
    for (std::uint32_t layer = 0; layer < program.index.layers; ++layer)
      program.positions.push_back({Work::kUpdate, layer});
  }
  return program;
}

std::vector<PlanState> nvme_states(const Setup& setup, const Program& program) {
  const StateIndex& index = program.index;
  std::vector<PlanState> states(index.size());
  const auto fill = [&](Tier tier, double params, double bytes_per_param,
                        std::uint32_t first) {
    if (tier != Tier::kNvme) return;
    const double bytes = params * bytes_per_param / double(index.layers);
    for (std::uint32_t layer = 0; layer < index.layers; ++layer) {
      states[first + layer] = {.bytes = static_cast<std::uint64_t>(bytes),
                               .leaves = !setup.mechanisms.keep};
    }
  };
  fill(setup.placement.weights, params_per_rank(setup, 3),
       setup.precision.weight, index.weight(0));
  fill(setup.placement.states, params_per_rank(setup, 1),
       setup.precision.states, index.states(0));
  if (keeps_grads(setup)) {
    fill(setup.placement.grads, params_per_rank(setup, 1),
         setup.precision.kept_grad, index.grad(0));
  }
  return states;
}

Result<std::vector<Plan>> nvme_plans(const Setup& setup,
                                     const Program& program) {
  const std::vector<PlanState> states = nvme_states(setup, program);
  std::vector<Plan> plans;
  if (std::ranges::all_of(states,
                          [](const PlanState& one) { return one.bytes == 0; }))
    return plans;
  const Trace trace = make_trace(setup, program);
  // With compute of unknown length each move starts as early as a lane that is
  // never idle would need it to. Writes count half, else they would take all
  // memory that is not in use, and no read could be ahead.
  constexpr double kReads = 1e9;
  PlanInput input{.states = states,
                  .budget_bytes = state_budget(setup),
                  .read_bytes_per_second = kReads,
                  .write_bytes_per_second = 2 * kReads,
                  .compute_seconds = {}};
  ZINF_ASSIGN(const std::uint64_t least, least_budget(trace, input));
  // Memory to keep states in, or to move them ahead of their uses.
  constexpr std::array<std::uint64_t, 3> kParts = {0, 16, 4};
  for (const std::uint64_t parts : kParts) {
    input.ahead_bytes = parts == 0 || input.budget_bytes <= least
                            ? 0
                            : (input.budget_bytes - least) / parts;
    ZINF_ASSIGN(Plan plan, make_plan(trace, input));
    plans.push_back(std::move(plan));
    if (!setup.mechanisms.keep) break;
  }
  return plans;
}

}  // namespace zinf::plan
