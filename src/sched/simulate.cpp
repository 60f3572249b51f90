#include <algorithm>

#include "src/base/strf.h"
#include "src/sched/gaps.h"
#include "zinf/plan.h"

namespace zinf {
namespace {

// Note [Simulation]: the first round starts with nothing in memory and forgives
// what that makes impossible; at its end the right states are there. The second
// fills the lanes, the third is the steady state and counts.
constexpr int kRounds = 3;

class Simulation {
 public:
  Simulation(const Trace& trace, const Plan& plan, const PlanInput& input)
      : trace_(trace),
        plan_(plan),
        input_(input),
        states_(input.states.size()) {
    for (std::size_t i = 0; i < states_.size(); ++i) {
      if (!input.states[i].stays) continue;
      states_[i].here = true;
      memory_bytes_ += input.states[i].bytes;
    }
  }

  Result<Forecast> run() {
    double compute = 0;
    for (const double seconds : input_.compute_seconds) compute += seconds;
    double begin = 0;
    for (int round = 0; round < kRounds; ++round) {
      strict_ = round > 0;
      begin = now_;
      forecast_ = {.high_bytes = memory_bytes_};
      for (std::size_t p = 0; p < trace_.size(); ++p) {
        const Status status = pass(p);
        if (!status.ok()) return status.in(strf("simulate: position %zu", p));
      }
    }
    forecast_.seconds = now_ - begin;
    forecast_.stall_seconds = std::max(0.0, forecast_.seconds - compute);
    return forecast_;
  }

 private:
  struct State {
    bool here = false;   // in memory, or its read started
    bool dirty = false;  // with content that was not written
    bool freed = false;
    double read_done = 0;
    double write_done = 0;
  };

  static Status wrong(std::uint32_t state, const char* what) {
    return Status::error(Code::kInvalid, strf("state %u %s", state, what));
  }

  Status pass(std::size_t position) {
    for (const Action& action : plan_.at(position)) ZINF_TRY(act(action));
    for (const StateUse& use : trace_.at(position)) ZINF_TRY(used(use));
    if (!input_.compute_seconds.empty())
      now_ += input_.compute_seconds[position];
    return {};
  }

  Status act(const Action& action) {
    if (action.state >= states_.size())
      return wrong(action.state, "is not known");
    State& state = states_[action.state];
    const std::uint64_t bytes = input_.states[action.state].bytes;
    switch (action.kind) {
      case ActionKind::kWrite:
        if (!state.dirty)
          return strict_ ? wrong(action.state, "is written again") : Status();
        forecast_.bytes_written += bytes;
        writes_done_ = std::max(writes_done_, now_) +
                       double(bytes) / input_.write_bytes_per_second;
        state.write_done = writes_done_;
        state.dirty = false;
        return {};
      case ActionKind::kDrop:
        if (!state.here)
          return strict_ ? wrong(action.state, "is dropped twice") : Status();
        if (state.dirty)
          return wrong(action.state, "is dropped before it was written");
        now_ = std::max(now_, state.write_done);
        give(state, bytes);
        return {};
      case ActionKind::kFetch:
        if (state.here) return wrong(action.state, "is fetched twice");
        take(state, bytes);
        forecast_.bytes_read += bytes;
        reads_done_ = std::max(reads_done_, now_) +
                      double(bytes) / input_.read_bytes_per_second;
        state.read_done = reads_done_;
        return {};
    }
    return wrong(action.state, "has an unknown action");
  }

  Status used(const StateUse& use) {
    State& state = states_[use.state];
    const std::uint64_t bytes = input_.states[use.state].bytes;
    if (use.kind == UseKind::kFree) {
      now_ = std::max({now_, state.write_done, state.read_done});
      if (state.here) give(state, bytes);
      state.dirty = false;
      state.freed = true;
      return {};
    }
    const bool needs = use.kind != UseKind::kReplace && !state.freed;
    if (needs && !state.here && strict_)
      return wrong(use.state, "is used but not fetched");
    if (!state.here) take(state, bytes);
    now_ = std::max(now_, state.read_done);
    if (use.kind != UseKind::kRead) {
      now_ = std::max(now_, state.write_done);
      state.dirty = true;
    }
    state.freed = false;
    return {};
  }

  void take(State& state, std::uint64_t bytes) {
    state.here = true;
    memory_bytes_ += bytes;
    forecast_.high_bytes = std::max(forecast_.high_bytes, memory_bytes_);
  }
  void give(State& state, std::uint64_t bytes) {
    state.here = false;
    memory_bytes_ -= bytes;
  }

  const Trace& trace_;
  const Plan& plan_;
  const PlanInput& input_;
  std::vector<State> states_;
  Forecast forecast_;
  std::uint64_t memory_bytes_ = 0;
  double now_ = 0;
  double reads_done_ = 0;  // the last of its lane
  double writes_done_ = 0;
  bool strict_ = false;
};

}  // namespace

Result<Forecast> simulate(const Trace& trace, const Plan& plan,
                          const PlanInput& input) {
  ZINF_TRY(sched::check_input(trace, input));
  if (plan.ends.size() != trace.size()) {
    return Status::error(Code::kInvalid,
                         strf("simulate: a plan of %zu positions for %zu",
                              plan.ends.size(), trace.size()));
  }
  return Simulation(trace, plan, input).run();
}

}  // namespace zinf
