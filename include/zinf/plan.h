// A Plan: what to fetch and what to drop at each position of a Trace.
//
// make_plan() and simulate() are pure functions: no threads, clocks or files.
// A plan is for the steady state, in which every step does the same and finds
// in memory what the step before has left there.
//
// Note [Plan]: before the uses of a position its actions are carried out in
// order: writes start, memory is given back, reads start. A state's memory
// counts from the start of its read (or from its replacement) until it is
// dropped; a drop waits for the state's write. What is guaranteed:
//   - At no position is more than the budget in memory, whatever the timing.
//   - Every use finds its state in memory or its read started; new content is
//     written before it is dropped, and content that is freed before that
//     never.
//   - Few bytes are moved. Finding the least is NP-hard with different sizes
//     and with writes, so what saves most per byte and position of memory is
//     kept first, and nothing that saves and still fits is left out. The tests
//     hold it to this: states of one size that are only read move the least of
//     all plans in every small case, and in long traces at most 5 % more than
//     any schedule, of however many steps, could; with different sizes and
//     writes small cases are in sum within 5 % of their least. A single one,
//     of few states with very different sizes, can be far from it.
//   - Reads start as early as memory allows, but not earlier than hides them
//     behind the compute; the same for how late memory is given back by writes.
//     Small ones may start with their neighbours (request_bytes).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "zinf/status.h"
#include "zinf/trace.h"

namespace zinf {

struct PlanState {
  std::uint64_t bytes = 0;
  bool stays = false;   // never dropped (Home::kMemory), used or not
  bool leaves = false;  // few of them stay between uses (Home::kAway)
};

struct PlanInput {
  std::span<const PlanState> states;  // by index
  std::uint64_t budget_bytes = 0;     // for all states together
  // Of the budget, not for keeping states between their uses but for moves
  // ahead of and behind them. More moves more bytes, and hides them better.
  std::uint64_t ahead_bytes = 0;
  // At no position more than this is kept of states that leave.
  std::uint64_t leaving_bytes = 0;
  // Moves in a row that are smaller than this start together, as one request of
  // about this size, or half of ahead_bytes if that is less. 0: each by itself.
  std::uint64_t request_bytes = 0;
  double read_bytes_per_second = 1e9;  // positive
  double write_bytes_per_second = 1e9;
  std::span<const double> compute_seconds;  // by position; empty: unknown
  // By position: what others than the states take of the budget. Empty: none.
  std::span<const std::uint64_t> taken_bytes = {};
};

enum class ActionKind : std::uint8_t {
  kWrite,  // start writing new content
  kDrop,   // wait for its write, if there is one; give the memory back
  kFetch,  // take memory, start reading
};

struct Action {
  std::uint32_t state = 0;
  ActionKind kind = ActionKind::kFetch;
  bool operator==(const Action&) const = default;
};

struct Plan {
  std::vector<Action> actions;      // by position
  std::vector<std::uint32_t> ends;  // of each position in actions

  std::span<const Action> at(std::size_t position) const {
    const std::size_t begin = position == 0 ? 0 : ends[position - 1];
    return std::span(actions).subspan(begin, ends[position] - begin);
  }
};

// kOverBudget, with the least budget that would do, when the states of one
// position together with those that stay do not fit; kInvalid for a state that
// is not in `states`, or other input that makes no sense. O(n log n) in uses.
Result<Plan> make_plan(const Trace& trace, const PlanInput& input);

// The plan that simulate() finds best, over some values of ahead_bytes: the
// input's does not count. Time counts, and of moves that are hidden a part of
// theirs, so nothing is moved twice for a small gain; and so do small requests.
// Takes as long as up to eight plans.
Result<Plan> fastest_plan(const Trace& trace, PlanInput input);

// The least budget with which make_plan() succeeds. kInvalid as above.
Result<std::uint64_t> least_budget(const Trace& trace, const PlanInput& input);

// One step of the steady state.
struct Forecast {
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t high_bytes = 0;  // of states, the most in memory
  double seconds = 0;
  double stall_seconds = 0;  // of these, waiting for reads and writes
};

// What the plan does, with one read and one write at a time. kInvalid when the
// plan is not one for this trace: a use without its content, a fetch of what is
// there, a drop of what is not there or of content that was not written.
Result<Forecast> simulate(const Trace& trace, const Plan& plan,
                          const PlanInput& input);

}  // namespace zinf
