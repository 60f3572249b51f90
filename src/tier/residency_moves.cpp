// A Residency's moves: how they are started, waited for and ended.
#include <utility>

#include "src/tier/residency_impl.h"
#include "zinf/io.h"

namespace zinf {

using enum Place;

std::uint64_t Residency::Impl::land(StateRef ref, const Status& outcome) {
  State& state = at(ref);
  bool reading = state.place == kReading;
  state.move = nullptr;
  bool for_nobody = reading && state.waiters == 0;
  if (for_nobody && outcome.code() == Code::kOverBudget) {
    move_to(state, kAbsent);  // whoever needs it tries again
    give_memory(state);
    return state.spec.bytes;
  }
  if (!reading && outcome.code() == Code::kOverBudget) {
    move_to(state, kDirty);  // there is no room below now
    give_replaced(state);
    refusal_ = outcome;
    return 0;
  }
  if (!outcome.ok()) {
    move_to(state, kFailed);
    state.error = outcome;
    give_replaced(state);
    if (reading) give_memory(state);
    return 0;
  }
  move_to(state, kResident);
  give_replaced(state);
  return state.leaving && idle(state) ? drop(ref) : 0;
}

void Residency::Impl::land_finished() {
  std::erase_if(writing_, [&](StateRef ref) ZINF_REQUIRES(mutex_) {
    State& state = states_[ref.index];
    if (state.place != kWriting) return true;
    if (state.move == nullptr || !state.move->done()) return false;
    (void)land(ref, state.move->wait());
    return true;
  });
}

std::uint64_t Residency::Impl::give_up_places(std::uint64_t bytes) {
  std::uint64_t given = 0;
  for (Place place : {kDirty, kResident}) {
    for (State& state : states_) {
      if (given >= bytes) return given;
      if (!state.in_use || !state.placed || state.place != place) continue;
      if (!options_.backing->discard(state.below).ok()) continue;
      state.placed = false;
      if (place == kResident) move_to(state, kDirty);
      given += state.spec.bytes;
    }
  }
  return given;
}

bool Residency::Impl::find_place(StateRef ref) {
  while (true) {
    std::uint32_t below = 0;
    {
      MutexLock lock(mutex_);
      below = at(ref).below;
    }
    Status status = options_.backing->prepare(below);
    MutexLock lock(mutex_);
    State& state = at(ref);
    state.placed = state.placed || status.ok();
    bool refused = status.code() == Code::kNoSpace;
    bool cleaning = std::exchange(state.cleaning, false) && !state.leaving;
    if (refused && !cleaning && give_up_places(state.spec.bytes) > 0) continue;
    if (cleaning) {
      full_below_ = refused;
    } else {
      refusal_ = refused ? status : Status();
    }
    if (!refused) return true;  // the write meets other errors again
    move_to(state, kDirty);
    changed_.notify_all();
    return false;
  }
}

Status Residency::Impl::refusal() const {
  MutexLock lock(mutex_);
  return refusal_;
}

void Residency::Impl::launch(StateRef ref) {
  State* state = nullptr;
  Place place = kEmpty;
  std::uint32_t below = 0;
  std::span<std::byte> bytes;
  {
    MutexLock lock(mutex_);
    state = &at(ref);
    place = state->place;
    below = state->below;
    bytes = state->block.bytes;
  }
  if (place == kWriting && !find_place(ref)) return;
  {
    MutexLock lock(mutex_);
    bool reading = place == kReading;
    ++(reading ? stats_.reads : stats_.writes);
    (reading ? stats_.bytes_read : stats_.bytes_written) += state->spec.bytes;
  }
  std::unique_ptr<Move> move = place == kReading
                                   ? options_.backing->read(below, bytes)
                                   : options_.backing->write(below, bytes);
  MutexLock lock(mutex_);
  state->move = std::move(move);
  changed_.notify_all();
}

void Residency::Impl::launch_all(const std::vector<StateRef>& refs) {
  io::Plug plug;
  for (StateRef ref : refs) launch(ref);
}

std::uint64_t Residency::Impl::wait_for(StateRef ref) {
  std::shared_ptr<Move> move;
  {
    MutexLock lock(mutex_);
    State& state = states_[ref.index];
    while (state.moving() && state.move == nullptr) changed_.wait(mutex_);
    if (!state.moving()) return given_back(state);
    move = state.move;
  }
  Status outcome = move->wait();
  MutexLock lock(mutex_);
  const State& state = states_[ref.index];
  return state.move == move ? land(ref, outcome) : given_back(state);
}

// Of one whose move another thread has landed.
std::uint64_t Residency::Impl::given_back(const State& state) const {
  return state.place == kAbsent ? state.spec.bytes : 0;
}

void Residency::Impl::wait_for_all() {
  std::vector<StateRef> moving;
  {
    MutexLock lock(mutex_);
    for (std::uint32_t i = 0; i < states_.size(); ++i) {
      if (states_[i].moving()) moving.push_back({i});
    }
  }
  for (StateRef ref : moving) (void)wait_for(ref);
}

}  // namespace zinf
