// Note [Keeping]: two steps. A sweep over some rounds of the trace drops, when
// memory is short, what saves least for the memory that it would take until its
// next use: among equals that is Belady's choice, the furthest next use. The
// sweep ends with other states in memory than it began with, so its choice may
// not fit the circle. Then gaps are packed into the circle one by one: first
// those that the sweep kept, then all others, each group by what they save per
// byte and position. The better of this and a packing without the sweep counts.
#include "src/sched/keep.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <queue>
#include <tuple>
#include <utility>

namespace zinf::sched {
namespace {

constexpr std::size_t kRounds = 2;
// Multiples of it, without their whole part, are spread evenly over [0, 1).
constexpr double kGolden = 0.6180339887498949;

class Sweep {
 public:
  Sweep(const Trace& trace, const Gaps& found, std::int64_t limit,
        std::size_t num_states)
      : trace_(trace),
        found_(found),
        limit_(limit),
        states_(num_states),
        kept_(found.gaps.size()) {}

  std::vector<bool> run() {
    for (std::size_t now = 0; now < kRounds * trace_.size(); ++now) {
      const std::size_t position = now % trace_.size();
      const auto uses = trace_.at(position);
      // A kFree gives its memory back only then.
      const bool frees = !uses.empty() && uses[0].kind == UseKind::kFree;
      if (!frees) use(uses);
      make_room(limit_ - found_.used_bytes[position], now);
      if (frees) use(uses);
      for (std::size_t i = 0; i < uses.size(); ++i)
        rest(trace_.begin(position) + i, now);
    }
    return std::move(kept_);
  }

 private:
  struct State {
    std::size_t until = 0;  // its next use when it rests in memory, else 0
    std::int64_t bytes = 0;
    bool dirty = false;
  };
  struct Resting {
    std::size_t until;
    std::size_t gap;
    bool operator<(const Resting& other) const { return until < other.until; }
  };
  using Furthest = std::priority_queue<Resting>;

  void use(std::span<const StateUse> uses) {
    for (const StateUse& use : uses) {
      State& state = states_[use.state];
      if (state.until == 0) continue;
      state.until = 0;
      resting_bytes_ -= state.bytes;
    }
  }

  void rest(std::size_t index, std::size_t now) {
    const Gap& gap = found_.gaps[index];
    State& state = states_[gap.state];
    kept_[index] = false;
    if (!gap.holds) {
      state.dirty = false;
      return;
    }
    state.dirty |= gap.dirties;
    const int saves = gap.saves(state.dirty);
    if (saves == 0) {
      state.dirty = false;
      return;
    }
    kept_[index] = true;
    state.until = now + 1 + gap.length;
    state.bytes = static_cast<std::int64_t>(gap.bytes);
    resting_bytes_ += state.bytes;
    by_saving_[saves - 1].push({.until = state.until, .gap = index});
  }

  void make_room(std::int64_t limit, std::size_t now) {
    while (resting_bytes_ > std::max<std::int64_t>(limit, 0)) {
      Furthest& once = current(by_saving_[0]);
      Furthest& twice = current(by_saving_[1]);
      const bool take_twice =
          once.empty() || (!twice.empty() && twice.top().until - now >
                                                 2 * (once.top().until - now));
      Furthest& from = take_twice ? twice : once;
      State& state = states_[found_.gaps[from.top().gap].state];
      kept_[from.top().gap] = false;
      resting_bytes_ -= state.bytes;
      state = {};
      from.pop();
    }
  }

  // Without the entries of states that were used or dropped since.
  Furthest& current(Furthest& resting) {
    while (!resting.empty()) {
      const Resting& top = resting.top();
      if (states_[found_.gaps[top.gap].state].until == top.until) break;
      resting.pop();
    }
    return resting;
  }

  const Trace& trace_;
  const Gaps& found_;
  const std::int64_t limit_;
  std::vector<State> states_;
  std::int64_t resting_bytes_ = 0;
  std::array<Furthest, 2> by_saving_;
  std::vector<bool> kept_;
};

// Gaps that can save something, best first: by positions per saving. Among
// equals those that go nearly all round are taken evenly from the whole step,
// so that the moves of the others are spread over it too; small ones by the
// request, so that what is left of them can still be moved together.
std::vector<std::uint32_t> by_density(const Gaps& found, std::size_t num_states,
                                      std::uint64_t request_bytes) {
  const std::size_t half_round = found.used_bytes.size() / 2;
  std::vector<bool> changes(num_states);
  for (const Gap& gap : found.gaps)
    if (gap.dirties) changes[gap.state] = true;
  std::vector<std::tuple<double, double, std::uint32_t>> keys;
  std::uint32_t first = 0;  // of the request that a gap belongs to
  std::uint64_t bytes = 0;  // of it so far
  for (std::uint32_t i = 0; i < found.gaps.size(); ++i) {
    const Gap& gap = found.gaps[i];
    const int saves = gap.saves(changes[gap.state]);
    if (saves == 0) continue;
    double turn = 0;
    if (gap.length > half_round) {
      const bool large = gap.bytes >= request_bytes;
      if (bytes == 0 || large) first = i;
      bytes += gap.bytes;
      if (bytes >= request_bytes || large) bytes = 0;
      turn = first * kGolden;
    }
    keys.emplace_back(gap.length / double(saves), turn - std::floor(turn), i);
  }
  std::ranges::sort(keys);
  std::vector<std::uint32_t> order;
  order.reserve(keys.size());
  for (const auto& key : keys) order.push_back(std::get<2>(key));
  return order;
}

std::vector<bool> pack(const Gaps& found,
                       const std::vector<std::uint32_t>& order,
                       const KeepLimits& limits) {
  Load load(found.used_bytes);
  Load leaving(std::vector<std::int64_t>(found.used_bytes.size()));
  const auto fits = [](const Load& in, const Gap& gap, std::int64_t limit) {
    const auto bytes = static_cast<std::int64_t>(gap.bytes);
    return in.room_from(gap.first, gap.length, limit - bytes) == gap.length;
  };
  std::vector<bool> kept(found.gaps.size());
  for (const std::uint32_t i : order) {
    const Gap& gap = found.gaps[i];
    if (!fits(load, gap, limits.all)) continue;
    if (gap.leaves && !fits(leaving, gap, limits.leaving)) continue;
    const auto bytes = static_cast<std::int64_t>(gap.bytes);
    load.add(gap.first, gap.length, bytes);
    if (gap.leaves) leaving.add(gap.first, gap.length, bytes);
    kept[i] = true;
  }
  return kept;
}

}  // namespace

std::vector<bool> choose_kept(const Trace& trace, const Gaps& found,
                              const KeepLimits& limits, std::size_t num_states,
                              std::uint64_t request_bytes) {
  const auto moved = [&](const std::vector<bool>& kept) {
    const Traffic sum = traffic(found.gaps, kept, num_states);
    return sum.read + sum.written;
  };
  const std::vector<std::uint32_t> order =
      by_density(found, num_states, request_bytes);
  std::vector<bool> best = pack(found, order, limits);

  const std::vector<bool> swept =
      Sweep(trace, found, limits.all, num_states).run();
  std::vector<std::uint32_t> swept_first;
  for (const bool which : {true, false})
    std::ranges::copy_if(order, std::back_inserter(swept_first),
                         [&](std::uint32_t i) { return swept[i] == which; });
  std::vector<bool> other = pack(found, swept_first, limits);
  if (moved(other) < moved(best)) best = std::move(other);

  // A gap without positions costs nothing; one that saves nothing after all is
  // better used for moves ahead.
  const Traffic sum = traffic(found.gaps, best, num_states);
  for (std::size_t i = 0; i < best.size(); ++i)
    best[i] = found.gaps[i].length == 0 || sum.saving[i];
  return best;
}

}  // namespace zinf::sched
