// What concerns all states of a tier: making room, flush, commit, rollback.
#include <algorithm>

#include "src/tier/residency_impl.h"

namespace zinf {

using enum Place;

// Small for what is to go first.
std::pair<Worth, std::int64_t> Residency::Impl::order(const State& state) {
  auto age = static_cast<std::int64_t>(state.last_use);
  return {state.worth, state.worth == Worth::kLow ? -age : age};
}

std::vector<StateRef> Residency::Impl::by_worth(Place place,
                                                std::optional<Home> home) {
  std::vector<StateRef> refs;
  for (std::uint32_t i = 0; i < states_.size(); ++i) {
    const State& state = states_[i];
    if (state.place != place || !idle(state)) continue;
    if (home && (state.home != *home || state.awaited)) continue;
    refs.push_back({i});
  }
  std::sort(refs.begin(), refs.end(),
            [&](StateRef a, StateRef b) ZINF_REQUIRES(mutex_) {
              return order(states_[a.index]) < order(states_[b.index]);
            });
  return refs;
}

// First what costs nothing, then what is already on its way, then a write.
std::uint64_t Residency::Impl::make_room(std::uint64_t bytes,
                                         std::optional<Home> home) {
  std::uint64_t freed = 0;
  while (true) {
    std::uint64_t refusals = 0;
    std::uint64_t freed_before = freed;
    std::vector<StateRef> moving;
    std::vector<StateRef> claimed;
    {
      MutexLock lock(mutex_);
      refusals = refusals_;
      std::uint64_t before = stats_.memory_bytes;
      land_finished();
      for (StateRef ref : by_worth(kResident, home)) {
        if (freed + before - stats_.memory_bytes >= bytes) break;
        (void)drop(ref);
      }
      freed += before - stats_.memory_bytes;
      if (freed >= bytes) return freed;
      moving = by_worth(kWriting, home);
      if (moving.empty()) {
        std::uint64_t coming = freed;
        for (StateRef ref : by_worth(kDirty, home)) {
          if (coming >= bytes) break;
          if (!claim_write(ref)) continue;
          claimed.push_back(ref);
          coming += at(ref).spec.bytes;
        }
        moving = claimed.empty() ? by_worth(kReading, home) : claimed;
      }
      for (StateRef ref : moving) at(ref).leaving = true;
    }
    if (moving.empty()) return freed;
    for (StateRef ref : claimed) launch(ref);
    for (StateRef ref : moving) {
      if (freed >= bytes) break;
      freed += wait_for(ref);
    }
    MutexLock lock(mutex_);
    // Those that find no room below would be tried again and again.
    if (freed == freed_before && refusals_ != refusals) return freed;
  }
}

Status Residency::Impl::flush() {
  std::vector<StateRef> claimed;
  {
    MutexLock lock(mutex_);
    for (std::uint32_t i = 0; i < states_.size(); ++i) {
      const State& state = states_[i];
      if (!state.in_use || state.removed) continue;
      if (claim_write({i})) claimed.push_back({i});
    }
  }
  for (StateRef ref : claimed) launch(ref);
  wait_for_all();
  MutexLock lock(mutex_);
  for (const State& state : states_) {
    if (state.removed) continue;
    if (state.place == kFailed) return state.error.in(state.spec.name());
    if (state.place == kDirty) {
      return Status::error(
          Code::kInvalid,
          state.spec.name() + " is being changed: nothing can be committed");
    }
  }
  return {};
}

Status Residency::Impl::commit(std::uint64_t step) {
  if (options_.backing == nullptr) {
    return Status::error(Code::kUnsupported,
                         "a commit needs a store below the memory");
  }
  ZINF_TRY(flush());
  return options_.backing->commit(step);
}

bool Residency::Impl::due(std::uint64_t step) const {
  return options_.backing != nullptr && options_.backing->due(step);
}

Status Residency::Impl::rollback() {
  if (options_.backing == nullptr) {
    return Status::error(Code::kUnsupported,
                         "a rollback needs a store below the memory");
  }
  {
    MutexLock lock(mutex_);
    while (rolling_back_) changed_.wait(mutex_);
    for (const State& state : states_) {
      if (state.pins == 0) continue;
      return Status::error(
          Code::kInvalid, "rollback while " + state.spec.name() + " is in use");
    }
    rolling_back_ = true;  // nobody pins or prefetches until it is over
  }
  wait_for_all();
  Status status = options_.backing->rollback();
  MutexLock lock(mutex_);
  for (std::uint32_t i = 0; i < states_.size() && status.ok(); ++i) {
    State& state = states_[i];
    if (!state.in_use) continue;
    // Memory that may not go is read into again, at the same address.
    if (ask({i}) != Leave::kKeep) give_memory(state);
    state.error = {};
    bool there = options_.backing->has_content(state.below);
    move_to(state, there ? kAbsent : kEmpty);
  }
  rolling_back_ = false;
  changed_.notify_all();
  return status;
}

}  // namespace zinf
