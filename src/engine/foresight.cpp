#include "src/engine/foresight.h"

#include <algorithm>
#include <utility>

namespace zinf {
namespace {

// Where no step ever ends, what is recorded has an end all the same.
constexpr std::uint64_t kMostPositions = std::uint64_t{1} << 16;
constexpr std::size_t kMostSettling = 16;  // positions

}  // namespace

void Foresight::use(std::span<const StateUse> at_once, std::uint64_t bytes,
                    bool evaluates) {
  if (at_once.empty()) return;
  MutexLock lock(mutex_);
  const bool again = evaluated_ == at_once.front().state;
  if (evaluated_ && (again || !evaluates)) end_step_locked();
  if (evaluates && now_ == begin_) evaluated_ = at_once.front().state;
  ++now_;
  if (book_.use(at_once) != Follow::kRecording) settle(at_once, bytes);
  if (now_ - begin_ >= kMostPositions) end_step_locked();
}

void Foresight::settle(std::span<const StateUse> at_once, std::uint64_t bytes) {
  Position position{.states = {}, .bytes = bytes};
  for (const StateUse& use : at_once) position.states.push_back(use.state);
  settling_.push_back(std::move(position));
  settling_now_bytes_ += bytes;
  while (settling_.size() > kMostSettling ||
         (settling_.size() > 1 && settling_now_bytes_ > settling_bytes_)) {
    const Position settled = std::move(settling_.front());
    settling_.pop_front();
    settling_now_bytes_ -= settled.bytes;
    for (const std::uint32_t state : settled.states) tell_next_use(state);
  }
  for (const Position& one : settling_) {
    for (const std::uint32_t state : one.states) {
      residency_.expect({state}, now_, now_ + 1);
    }
  }
}

void Foresight::tell_next_use(std::uint32_t state) {
  const std::optional<std::size_t> until = book_.until_use(state);
  residency_.expect({state}, now_, until ? now_ + 1 + *until : 0);
}

void Foresight::end_step() {
  MutexLock lock(mutex_);
  if (now_ > begin_) end_step_locked();
}

void Foresight::end_step_locked() {
  book_.end_step();
  begin_ = now_;
  evaluated_.reset();
}

}  // namespace zinf
