#include "src/sched/gaps.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/base/strf.h"
#include "src/sched/load.h"

namespace zinf::sched {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

// Positions from `from` to `to`, going forward; a whole round when equal.
std::uint32_t distance(std::uint32_t from, std::uint32_t to,
                       std::size_t num_positions) {
  const auto round = static_cast<std::uint32_t>(num_positions);
  return to > from ? to - from : to + round - from;
}

Gap make_gap(UseKind before, UseKind after) {
  const bool empty = before == UseKind::kFree;
  return {
      .holds = !empty,
      .dirties = before == UseKind::kChange || before == UseKind::kReplace,
      .reads = !empty && (after == UseKind::kRead || after == UseKind::kChange),
      .ends = after != UseKind::kRead};
}

}  // namespace

// Of what is given by position, or not at all.
static Status check_length(const char* what, std::size_t length,
                           const Trace& trace) {
  if (length == 0 || length == trace.size()) return {};
  return Status::error(Code::kInvalid,
                       strf("plan: %s %zu positions for a trace of %zu", what,
                            length, trace.size()));
}

Status check_input(const Trace& trace, const PlanInput& input) {
  if (!(input.read_bytes_per_second > 0 && input.write_bytes_per_second > 0))
    return Status::error(Code::kInvalid, "plan: a bandwidth is not positive");
  ZINF_TRY(check_length("the compute times of", input.compute_seconds.size(),
                        trace));
  ZINF_TRY(
      check_length("what others take at", input.taken_bytes.size(), trace));
  std::uint64_t left = kMostBytes;
  const auto most = std::ranges::max_element(input.taken_bytes);
  if (most != input.taken_bytes.end()) left -= std::min(left, *most);
  for (const PlanState& state : input.states) {
    if (state.bytes > left)
      return Status::error(Code::kInvalid, "plan: the states exceed 4 EiB");
    left -= state.bytes;
  }
  for (const StateUse& use : trace.uses()) {
    if (use.state >= input.states.size()) {
      return Status::error(Code::kInvalid,
                           strf("plan: a use of state %u of %zu", use.state,
                                input.states.size()));
    }
  }
  return {};
}

Gaps find_gaps(const Trace& trace, const PlanInput& input) {
  const auto uses = trace.uses();
  const auto num_states = input.states.size();
  Gaps found{.gaps = std::vector<Gap>(uses.size()), .used_bytes = {}};
  std::vector<std::uint32_t> positions(uses.size());
  for (std::uint32_t p = 0; p < trace.size(); ++p) {
    for (std::size_t i = trace.begin(p);
         i < trace.begin(p) + trace.at(p).size(); ++i)
      positions[i] = p;
  }

  // Backwards twice: the first round learns the first use of every state.
  std::vector<std::uint32_t> next(num_states, kNone);
  for (std::size_t i = 2 * uses.size(); i-- > 0;) {
    const std::size_t use = i % uses.size();
    const std::uint32_t state = uses[use].state;
    if (i < uses.size()) {
      const UseKind after = uses[next[state]].kind;
      const std::uint32_t to_next =
          distance(positions[use], positions[next[state]], trace.size());
      Gap& gap = found.gaps[use] = make_gap(uses[use].kind, after);
      gap.state = state;
      gap.bytes = input.states[state].bytes;
      gap.leaves = input.states[state].leaves;
      gap.first = (positions[use] + 1) % trace.size();
      gap.length = to_next - (after == UseKind::kFree ? 0 : 1);
    }
    next[state] = static_cast<std::uint32_t>(use);
  }

  ArcSums used(trace.size());
  for (std::size_t i = 0; i < uses.size(); ++i) {
    Gap& gap = found.gaps[i];
    const auto bytes = static_cast<std::int64_t>(gap.bytes);
    if (uses[i].kind != UseKind::kFree) used.add(positions[i], 1, bytes);
    if (gap.holds && input.states[gap.state].stays) {
      used.add(gap.first, gap.length, bytes);
      gap.holds = false;
    }
  }
  for (std::size_t state = 0; state < num_states; ++state) {
    if (next[state] == kNone && input.states[state].stays)
      used.add(0, trace.size(),
               static_cast<std::int64_t>(input.states[state].bytes));
  }
  found.used_bytes = std::move(used).sums();
  for (std::size_t p = 0; p < input.taken_bytes.size(); ++p)
    found.used_bytes[p] += static_cast<std::int64_t>(input.taken_bytes[p]);
  return found;
}

Traffic traffic(const std::vector<Gap>& gaps, const std::vector<bool>& kept,
                std::size_t num_states) {
  Traffic sum{.writes = std::vector<bool>(gaps.size()),
              .saving = std::vector<bool>(gaps.size())};
  std::vector<bool> dirty(num_states);
  // Twice: only the second round knows what is dirty at the step's begin.
  for (std::size_t i = 0; i < 2 * gaps.size(); ++i) {
    const std::size_t index = i % gaps.size();
    const Gap& gap = gaps[index];
    if (!gap.holds) {
      dirty[gap.state] = false;
      continue;
    }
    if (gap.dirties) dirty[gap.state] = true;
    const bool counts = i >= gaps.size();
    if (kept[index]) {
      if (counts) sum.saving[index] = gap.saves(dirty[gap.state]) > 0;
      continue;
    }
    if (counts && gap.reads) sum.read += gap.bytes;
    if (counts && dirty[gap.state]) {
      sum.written += gap.bytes;
      sum.writes[index] = true;
    }
    dirty[gap.state] = false;
  }
  return sum;
}

}  // namespace zinf::sched
