#include "zinf/plan.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "src/base/strf.h"
#include "src/sched/gaps.h"
#include "src/sched/keep.h"
#include "src/sched/timing.h"
#include "zinf/bytes.h"

namespace zinf {
namespace {

using sched::Dropped;
using sched::Gap;
using sched::Gaps;

std::uint64_t least(const Gaps& found) {
  const auto most = std::ranges::max_element(found.used_bytes);
  return most == found.used_bytes.end() ? 0 : static_cast<std::uint64_t>(*most);
}

Plan list_actions(const Gaps& found, const std::vector<Dropped>& dropped) {
  struct Timed {
    std::uint32_t position;
    std::uint32_t ahead;  // reads that are needed earlier start earlier
    Action action;
    auto key() const {
      return std::tuple(position, action.kind, ahead, action.state);
    }
  };
  const auto round = static_cast<std::uint32_t>(found.used_bytes.size());
  std::vector<Timed> timed;
  const auto add = [&](std::uint32_t position, const Dropped& d,
                       ActionKind kind) {
    timed.push_back({.position = position % round,
                     .ahead = d.ahead,
                     .action = {found.gaps[d.gap].state, kind}});
  };
  for (const Dropped& d : dropped) {
    const Gap& gap = found.gaps[d.gap];
    if (d.writes) add(gap.first + d.delay, d, ActionKind::kWrite);
    add(gap.first + d.behind, d, ActionKind::kDrop);
    if (gap.reads) add(gap.first + gap.length - d.ahead, d, ActionKind::kFetch);
  }
  std::ranges::sort(timed, {}, &Timed::key);

  Plan plan;
  for (std::uint32_t position = 0, i = 0; position < round; ++position) {
    for (; i < timed.size() && timed[i].position == position; ++i)
      plan.actions.push_back(timed[i].action);
    plan.ends.push_back(i);
  }
  return plan;
}

// Small moves that start together are one request of about request_bytes.
double num_requests(const Plan& plan, const PlanInput& input) {
  if (input.request_bytes == 0) return 0;
  double requests = 0;
  for (std::size_t p = 0; p < plan.ends.size(); ++p) {
    for (const ActionKind kind : {ActionKind::kWrite, ActionKind::kFetch}) {
      std::uint64_t small = 0;
      for (const Action& action : plan.at(p)) {
        const std::uint64_t bytes = input.states[action.state].bytes;
        if (action.kind == kind && bytes < input.request_bytes) small += bytes;
      }
      requests += std::ceil(double(small) / double(input.request_bytes));
    }
  }
  return requests;
}

// Moves that nobody waits for take time too: they compete with the compute for
// the cores and the memory. Small GEMMs beside a busy disk take 1.6 to 2 times
// as long, so half of a move's time counts; and a small request keeps a core
// busy for longer than its bytes take.
double cost(const Plan& plan, const Forecast& step, const PlanInput& input) {
  constexpr double kShare = 0.5;
  constexpr double kRequestSeconds = 40e-6;
  const double reading = double(step.bytes_read) / input.read_bytes_per_second;
  const double writing =
      double(step.bytes_written) / input.write_bytes_per_second;
  return step.seconds + kShare * (reading + writing) +
         kRequestSeconds * num_requests(plan, input);
}

// Memory in which small moves can wait for each other, to become requests.
std::uint64_t joining_bytes(const PlanInput& input, std::uint64_t least_bytes) {
  const bool small = std::ranges::any_of(input.states, [&](PlanState state) {
    return !state.stays && state.bytes < input.request_bytes;
  });
  if (!small || input.budget_bytes < least_bytes) return 0;
  return std::min(2 * input.request_bytes,
                  (input.budget_bytes - least_bytes) / 8);
}

}  // namespace

Result<std::uint64_t> least_budget(const Trace& trace, const PlanInput& input) {
  ZINF_TRY(sched::check_input(trace, input));
  const Gaps found = sched::find_gaps(trace, input);
  return least(found);
}

Result<Plan> make_plan(const Trace& trace, const PlanInput& input) {
  ZINF_TRY(sched::check_input(trace, input));
  const Gaps found = sched::find_gaps(trace, input);
  if (least(found) > input.budget_bytes) {
    return Status::error(
        Code::kOverBudget,
        strf("plan: a budget of %s (%llu B); the states used at once need at "
             "least %s (%llu B)",
             format_bytes(input.budget_bytes).c_str(),
             static_cast<unsigned long long>(input.budget_bytes),
             format_bytes(least(found)).c_str(),
             static_cast<unsigned long long>(least(found))));
  }
  const std::uint64_t budget = std::min(input.budget_bytes, sched::kMostBytes);
  const std::uint64_t for_keeping =
      budget - std::min(input.ahead_bytes, budget);
  const std::uint64_t leaving = std::min(input.leaving_bytes, for_keeping);
  const std::vector<bool> kept =
      sched::choose_kept(trace, found,
                         {.all = static_cast<std::int64_t>(for_keeping),
                          .leaving = static_cast<std::int64_t>(leaving)},
                         input.states.size(), input.request_bytes);
  return list_actions(found, sched::time_moves(found, kept, input));
}

Result<Plan> fastest_plan(const Trace& trace, PlanInput input) {
  ZINF_ASSIGN(const std::uint64_t least_bytes, least_budget(trace, input));
  input.ahead_bytes = 0;
  ZINF_ASSIGN(Plan best, make_plan(trace, input));
  ZINF_ASSIGN(Forecast step, simulate(trace, best, input));
  double least_cost = cost(best, step, input);
  const auto attempt = [&](std::uint64_t ahead_bytes) -> Status {
    if (ahead_bytes == input.ahead_bytes) return {};
    input.ahead_bytes = ahead_bytes;
    ZINF_ASSIGN(Plan plan, make_plan(trace, input));
    ZINF_ASSIGN(step, simulate(trace, plan, input));
    const double costs = cost(plan, step, input);
    if (costs >= least_cost) return {};
    best = std::move(plan);
    least_cost = costs;
    return {};
  };
  const std::uint64_t joining = joining_bytes(input, least_bytes);
  if (step.bytes_read > 0) ZINF_TRY(attempt(joining));
  for (std::uint64_t parts = 128; parts > 1; parts /= 2) {
    if (step.stall_seconds <= 0) break;
    const std::uint64_t bytes = (input.budget_bytes - least_bytes) / parts;
    ZINF_TRY(attempt(std::max(joining, bytes)));
  }
  return best;
}

}  // namespace zinf
