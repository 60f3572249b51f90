// What concerns all states of a tier: making room, flush, commit, rollback.
#include <algorithm>

#include "src/base/align.h"
#include "src/tier/residency_impl.h"

namespace zinf {

using enum Place;

bool Residency::Impl::may_go(const State& state, const Goers& goers) const {
  if (!idle(state)) return false;
  if (goers.home && (state.home != *goers.home || state.awaited)) return false;
  return goers.later_than == 0 || state.next_use <= now_ ||
         state.next_use > goers.later_than;
}

// What nobody expects goes first: of that, what costs no write. Then what is
// used last. Small states give little room and cost a request each.
Residency::Impl::Order Residency::Impl::order(const State& state) const {
  constexpr std::uint64_t kSmallBytes = 256 * kKiB;
  bool small = state.spec.bytes < kSmallBytes;
  if (state.next_use > now_) {
    return {small, true, 0, Worth::kLow,
            -static_cast<std::int64_t>(state.next_use)};
  }
  auto age = static_cast<std::int64_t>(state.last_use);
  int cost = state.place == kResident ? 0 : state.place == kWriting ? 1 : 2;
  return {small, false, cost, state.worth,
          state.worth == Worth::kLow ? -age : age};
}

std::vector<StateRef> Residency::Impl::in_order(const Goers& goers) {
  std::vector<std::pair<Order, std::uint32_t>> found;
  for (std::uint32_t i = 0; i < states_.size(); ++i) {
    const State& state = states_[i];
    bool there = state.place == kResident || state.place == kDirty ||
                 (state.place == kWriting && !state.leaving);
    if (there && may_go(state, goers)) found.emplace_back(order(state), i);
  }
  std::ranges::sort(found);
  std::vector<StateRef> refs;
  for (const auto& [its_order, index] : found) refs.push_back({index});
  return refs;
}

std::vector<StateRef> Residency::Impl::on_their_way(Place place,
                                                    const Goers& goers) {
  std::vector<StateRef> refs;
  for (std::uint32_t i = 0; i < states_.size(); ++i) {
    const State& state = states_[i];
    if (state.place != place || !may_go(state, goers)) continue;
    if (place == kReading || state.leaving) refs.push_back({i});
  }
  return refs;
}

Residency::Impl::Leaving Residency::Impl::start_leaving(
    std::uint64_t bytes, const Goers& goers, std::vector<bool>& tried) {
  Leaving leaving;
  std::uint64_t coming = 0;
  for (StateRef ref : in_order(goers)) {
    if (coming >= bytes) break;
    if (tried.size() <= ref.index) tried.resize(states_.size());
    if (tried[ref.index]) continue;
    if (at(ref).place == kResident) coming += drop(ref);
    bool claimed = claim_write(ref);
    if (at(ref).place != kWriting) continue;  // it is gone, or has to stay
    tried[ref.index] = true;
    at(ref).leaving = true;
    if (claimed) leaving.claimed.push_back(ref);
    leaving.moving.push_back(ref);
    coming += at(ref).spec.bytes;
  }
  return leaving;
}

std::vector<StateRef> Residency::Impl::start_cleaning(const Goers& goers) {
  constexpr std::uint64_t kMostBytes = 64 * kMiB;
  if (full_below_ || !options_.backing || !options_.backing->in_background()) {
    return {};
  }
  std::uint64_t writing = 0;
  for (StateRef ref : writing_) writing += states_[ref.index].spec.bytes;
  std::vector<StateRef> claimed;
  for (StateRef ref : in_order(goers)) {
    if (writing >= kMostBytes) break;
    State& state = at(ref);
    if (state.next_use > now_ || state.worth == Worth::kHigh) continue;
    if (!claim_write(ref)) continue;
    state.cleaning = true;
    claimed.push_back(ref);
    writing += state.spec.bytes;
  }
  return claimed;
}

// First what is already on its way out, then what is to go first: it is
// dropped, or written and dropped. In the end what was read for nothing.
// Whoever needs room will need more: what goes next is written meanwhile.
std::uint64_t Residency::Impl::make_room(std::uint64_t bytes,
                                         const Goers& goers) {
  std::uint64_t freed = 0;
  std::vector<bool> tried;
  while (true) {
    Leaving leaving;
    std::vector<StateRef> cleaned;
    {
      MutexLock lock(mutex_);
      std::uint64_t before = stats_.memory_bytes;
      land_finished();
      leaving.moving = on_their_way(kWriting, {.home = goers.home});
      std::uint64_t given = freed + before - stats_.memory_bytes;
      if (leaving.moving.empty() && given < bytes) {
        leaving = start_leaving(bytes - given, goers, tried);
      }
      freed += before - stats_.memory_bytes;
      if (goers.later_than == 0 && !goers.home) cleaned = start_cleaning(goers);
      if (leaving.moving.empty() && freed < bytes && goers.later_than == 0) {
        leaving.moving = on_their_way(kReading, goers);
        for (StateRef ref : leaving.moving) at(ref).leaving = true;
      }
    }
    launch_all(leaving.claimed);
    launch_all(cleaned);
    if (leaving.moving.empty()) return freed;
    for (StateRef ref : leaving.moving) {
      if (freed >= bytes) break;
      freed += wait_for(ref);
    }
    if (freed >= bytes) return freed;
  }
}

std::uint64_t Residency::Impl::drop_idle(std::uint64_t bytes) {
  MutexLock lock(mutex_);
  land_finished();
  std::uint64_t freed = 0;
  for (bool expected : {false, true}) {
    for (std::uint32_t i = 0; i < states_.size() && freed < bytes; ++i) {
      const State& state = states_[i];
      if (state.place != kResident || state.block.owner == nullptr ||
          !idle(state) || (state.next_use > now_) != expected) {
        continue;
      }
      freed += drop({i});
    }
  }
  return freed;
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
  launch_all(claimed);
  wait_for_all();
  MutexLock lock(mutex_);
  for (const State& state : states_) {
    if (state.removed) continue;
    if (state.place == kFailed) return state.error.in(state.spec.name());
    if (state.place != kDirty) continue;
    if (state.writers == 0 && !refusal_.ok()) {
      return refusal_.in(state.spec.name());
    }
    return Status::error(
        Code::kInvalid,
        state.spec.name() + " is being changed: nothing can be committed");
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
