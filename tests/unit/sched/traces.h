// Traces to plan, and slow but simple ways to know the least bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "zinf/plan.h"
#include "zinf/trace.h"

namespace zinf {

struct Case {
  Trace trace;
  std::vector<PlanState> states;

  PlanInput input(std::uint64_t budget_bytes) const {
    PlanInput made;
    made.states = states;
    made.budget_bytes = budget_bytes;
    return made;
  }
  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const PlanState& state : states) sum += state.bytes;
    return sum;
  }
  // From the least budget to one for everything: `part` of 8.
  std::uint64_t budget(std::uint32_t part) const {
    const std::uint64_t least = least_budget(trace, input(0)).value();
    return least + (bytes() - least) * part / 8;
  }
};

// Every state once per step, in order.
inline Case scan(std::uint32_t num_states, UseKind kind,
                 std::uint64_t bytes = 1) {
  Case made;
  for (std::uint32_t state = 0; state < num_states; ++state) {
    made.trace.add({state, kind});
    made.states.push_back({.bytes = bytes});
  }
  return made;
}

// A step of Adam: forward, backward with gradients, update. Layer i has the
// weight 4i, the moments 4i + 1 and 4i + 2 and the gradient 4i + 3.
inline Case training_step(std::uint32_t num_layers, std::uint64_t bytes) {
  Case made;
  made.states.assign(std::size_t{4} * num_layers, {.bytes = bytes});
  for (std::uint32_t i = 0; i < num_layers; ++i)
    made.trace.add({4 * i, UseKind::kRead});
  for (std::uint32_t i = num_layers; i-- > 0;)
    made.trace.add(std::vector<StateUse>{{4 * i, UseKind::kRead},
                                         {4 * i + 3, UseKind::kReplace}});
  for (std::uint32_t i = 0; i < num_layers; ++i) {
    made.trace.add(std::vector<StateUse>{{4 * i, UseKind::kChange},
                                         {4 * i + 1, UseKind::kChange},
                                         {4 * i + 2, UseKind::kChange},
                                         {4 * i + 3, UseKind::kRead}});
    made.trace.add({4 * i + 3, UseKind::kFree});
  }
  return made;
}

enum class Sizes : std::uint8_t { kUniform, kDifferent };
enum class Kinds : std::uint8_t { kReads, kAll };

inline Case random_case(std::uint32_t num_uses, std::uint32_t num_states,
                        Sizes sizes, Kinds kinds, std::uint32_t seed) {
  std::mt19937 generator(seed);
  const auto random = [&] { return static_cast<std::uint32_t>(generator()); };
  Case made;
  for (std::uint32_t state = 0; state < num_states; ++state)
    made.states.push_back(
        {.bytes = sizes == Sizes::kUniform ? 1 : random() % 100});
  while (made.trace.uses().size() < num_uses) {
    const auto kind =
        static_cast<UseKind>(kinds == Kinds::kReads ? 0 : random() % 4);
    std::vector<StateUse> at_once{{random() % num_states, kind}};
    if (kind != UseKind::kFree && random() % 4 == 0)
      at_once.push_back({random() % num_states, UseKind::kRead});
    made.trace.add(at_once);
  }
  return made;
}

// What a choice of kept gaps (bit i: the one after use i) moves per step;
// nothing when it does not fit.
class AllPlans {
 public:
  AllPlans(const Case& given, std::uint64_t budget_bytes)
      : given_(given), budget_bytes_(budget_bytes) {
    for (std::uint32_t p = 0; p < given.trace.size(); ++p)
      for (const StateUse& use : given.trace.at(p)) uses_.push_back({use, p});
  }

  std::uint64_t least_bytes() const {
    std::uint64_t least = ~std::uint64_t{0};
    for (std::uint64_t kept = 0; kept < std::uint64_t{1} << uses_.size();
         ++kept)
      if (fits(kept)) least = std::min(least, moved(kept));
    return least;
  }

 private:
  struct Use {
    StateUse use;
    std::uint32_t position;
  };
  std::uint64_t bytes(const Use& use) const {
    return given_.states[use.use.state].bytes;
  }
  const Use& next(std::size_t index) const {
    for (std::size_t i = index + 1;; ++i)
      if (uses_[i % uses_.size()].use.state == uses_[index].use.state)
        return uses_[i % uses_.size()];
  }

  bool fits(std::uint64_t kept) const {
    const std::size_t round = given_.trace.size();
    std::vector<std::uint64_t> memory(round);
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      const bool frees = uses_[i].use.kind == UseKind::kFree;
      if (!frees) memory[uses_[i].position] += bytes(uses_[i]);
      if (frees || !(kept >> i & 1)) continue;
      const Use& after = next(i);
      std::size_t p = uses_[i].position;
      while ((p = (p + 1) % round) != after.position)
        memory[p] += bytes(uses_[i]);
      if (after.use.kind == UseKind::kFree) memory[p] += bytes(uses_[i]);
    }
    return std::ranges::max(memory) <= budget_bytes_;
  }

  std::uint64_t moved(std::uint64_t kept) const {
    std::uint64_t sum = 0;
    std::map<std::uint32_t, bool> dirty;
    for (std::size_t i = 0; i < 2 * uses_.size(); ++i) {
      const Use& use = uses_[i % uses_.size()];
      bool& is_dirty = dirty[use.use.state];
      if (use.use.kind != UseKind::kRead)
        is_dirty = use.use.kind != UseKind::kFree;
      if (kept >> (i % uses_.size()) & 1) continue;
      if (use.use.kind == UseKind::kFree) continue;
      const UseKind after = next(i % uses_.size()).use.kind;
      const bool reads = after == UseKind::kRead || after == UseKind::kChange;
      if (i >= uses_.size()) sum += (int{reads} + int{is_dirty}) * bytes(use);
      is_dirty = false;
    }
    return sum;
  }

  const Case& given_;
  const std::uint64_t budget_bytes_;
  std::vector<Use> uses_;
};

// The least bytes per step of any schedule, however many steps long, that only
// reads: Belady's choice, with states that can be dropped in part.
inline double belady_bytes(const Case& given, std::uint64_t budget_bytes) {
  constexpr std::size_t kRounds = 30;
  constexpr std::size_t kWarmUp = 10;
  const std::size_t round = given.trace.size();
  std::vector<std::vector<std::size_t>> positions(given.states.size());
  for (std::size_t now = 0; now < (kRounds + 1) * round; ++now)
    for (const StateUse& use : given.trace.at(now % round))
      positions[use.state].push_back(now);

  std::map<std::size_t, std::map<std::uint32_t, std::uint64_t>> resting;
  std::vector<std::size_t> next(given.states.size());
  std::uint64_t resting_bytes = 0;
  std::uint64_t read = 0;
  for (std::size_t now = 0; now < kRounds * round; ++now) {
    std::uint64_t used = 0;
    for (const StateUse& use : given.trace.at(now % round)) {
      const std::uint64_t bytes = given.states[use.state].bytes;
      const std::uint64_t here = resting[now][use.state];
      if (now >= kWarmUp * round) read += bytes - here;
      resting_bytes -= here;
      used += bytes;
    }
    resting.erase(now);
    while (resting_bytes + used > budget_bytes) {
      auto& furthest = std::prev(resting.end())->second;
      auto& [state, bytes] = *furthest.begin();
      const std::uint64_t drop =
          std::min(bytes, resting_bytes + used - budget_bytes);
      bytes -= drop;
      resting_bytes -= drop;
      if (bytes == 0) furthest.erase(furthest.begin());
      if (furthest.empty()) resting.erase(std::prev(resting.end()));
    }
    for (const StateUse& use : given.trace.at(now % round)) {
      const std::uint64_t bytes = given.states[use.state].bytes;
      resting[positions[use.state][++next[use.state]]][use.state] = bytes;
      resting_bytes += bytes;
    }
  }
  return double(read) / double(kRounds - kWarmUp);
}

}  // namespace zinf
