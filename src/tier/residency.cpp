#include "zinf/residency.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <utility>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/tier/residency_impl.h"
#include "zinf/io.h"
#include "zinf/log.h"

namespace zinf {
namespace {

using enum Place;

constexpr std::array<std::string_view, kNumPlaces> kPlaceNames = {
    "empty", "absent", "reading", "resident", "dirty", "writing", "failed"};

using Clock = std::chrono::steady_clock;

std::uint64_t page_bytes(const StateSpec& spec) {
  return align_up(spec.bytes, std::uint64_t{kPage});
}

std::uint64_t ns_since(Clock::time_point begin) {
  std::chrono::nanoseconds took = Clock::now() - begin;
  return static_cast<std::uint64_t>(took.count());
}

}  // namespace

std::string_view place_name(Place place) {
  return kPlaceNames[static_cast<std::size_t>(place)];
}

bool may_move(Place from, Place to) {
  switch (to) {
    case kEmpty:
      return from != kReading && from != kWriting;
    case kAbsent:  // dropped, rolled back, or read for nobody without room
      return from != kWriting;
    case kReading:
      return from == kAbsent;
    case kResident:
      return from == kReading || from == kWriting;
    case kDirty:
      return from == kEmpty || from == kAbsent || from == kResident ||
             from == kWriting || from == kFailed;
    case kWriting:
      return from == kDirty;
    case kFailed:
      return from == kReading || from == kWriting;
  }
  return false;
}

Residency::Impl::~Impl() {
  wait_for_all();
  MutexLock lock(mutex_);
  for (const State& state : states_) {
    ZINF_CHECK(state.pins == 0, "%s is pinned when its tier ends",
               state.spec.name().c_str());
  }
}

Residency::Impl::State* Residency::Impl::find(StateRef ref) {
  if (ref.index >= states_.size()) return nullptr;
  State& state = states_[ref.index];
  return state.in_use && !state.removed ? &state : nullptr;
}

Residency::Impl::State& Residency::Impl::at(StateRef ref) {
  ZINF_CHECK(ref.index < states_.size() && states_[ref.index].in_use,
             "there is no state %u", ref.index);
  return states_[ref.index];
}

void Residency::Impl::move_to(State& state, Place to) {
  ZINF_CHECK(may_move(state.place, to), "%s: from %s to %s",
             state.spec.name().c_str(), place_name(state.place).data(),
             place_name(to).data());
  state.place = to;
}

Result<StateRef> Residency::Impl::add(const StateSpec& spec, Home home,
                                      void* owner, Worth worth) {
  if (options_.backing == nullptr && home != Home::kMemory) {
    return Status::error(Code::kInvalid,
                         "the home of " + spec.name() +
                             " is below this memory, and nothing is there");
  }
  State state{.spec = spec,
              .home = home,
              .worth = worth,
              .owner = owner,
              .in_use = true};
  if (options_.backing != nullptr) {
    ZINF_ASSIGN(state.below, options_.backing->add(spec));
    state.placed = options_.backing->has_content(state.below);
    if (state.placed) state.place = kAbsent;
  }
  MutexLock lock(mutex_);
  ++stats_.num_states;
  if (home == Home::kAway) away_sizes_.insert(page_bytes(spec));
  StateRef ref{entry_for(spec.name())};
  states_[ref.index] = std::move(state);
  return ref;
}

// Gradients come and go with every step: each shall be known by one index.
std::uint32_t Residency::Impl::entry_for(const std::string& name) {
  auto before = freed_.find(name);
  if (before == freed_.end() && freed_.size() > stats_.num_states) {
    before = freed_.begin();
  }
  if (before != freed_.end()) {
    std::uint32_t index = before->second;
    freed_.erase(before);
    return index;
  }
  states_.emplace_back();
  return static_cast<std::uint32_t>(states_.size() - 1);
}

void Residency::Impl::rename(StateRef ref, const std::string& unit) {
  std::uint32_t below = 0;
  {
    MutexLock lock(mutex_);
    State& state = at(ref);
    state.spec.unit = unit;
    below = state.below;
  }
  if (options_.backing != nullptr) options_.backing->rename(below, unit);
}

void Residency::Impl::remove(StateRef ref) {
  {
    MutexLock lock(mutex_);
    State& state = at(ref);
    state.removed = true;
    if (state.pins > 0) return;  // the last one's end forgets it
  }
  forget(ref);
}

void Residency::Impl::forget(StateRef ref) {
  (void)wait_for(ref);
  std::uint32_t below = 0;
  {
    MutexLock lock(mutex_);
    State& state = at(ref);
    below = state.below;
    give_memory(state);
    if (state.home == Home::kAway) {
      away_sizes_.extract(page_bytes(state.spec));
    }
    state = {.spec = std::move(state.spec), .home = state.home};
    freed_.emplace(state.spec.name(), ref.index);
    --stats_.num_states;
    full_below_ = false;
  }
  if (options_.backing == nullptr) return;
  Status status = options_.backing->remove(below);
  if (!status.ok()) {
    log(LogLevel::kError, "a state could not be removed: %s",
        status.text().c_str());
  }
}

Status Residency::Impl::take_memory(State& state) {
  if (state.block.owner != nullptr || state.spec.bytes == 0) return {};
  ZINF_ASSIGN(state.block, options_.allocate(state.spec.bytes));
  count_memory(state, true);
  return {};
}

void Residency::Impl::count_memory(const State& state, bool more) {
  std::uint64_t change = more ? state.spec.bytes : -state.spec.bytes;
  stats_.memory_bytes += change;
  if (state.home == Home::kAway) stats_.away_bytes += change;
  stats_.memory_high_bytes =
      std::max(stats_.memory_high_bytes, stats_.memory_bytes);
}

void Residency::Impl::set_awaited(State& state, bool awaited) {
  if (state.awaited == awaited) return;
  state.awaited = awaited;
  if (state.home != Home::kAway) return;
  awaited_bytes_ += awaited ? state.spec.bytes : -state.spec.bytes;
}

void Residency::Impl::give(StateRef ref, Block block) {
  MutexLock lock(mutex_);
  State& state = at(ref);
  ZINF_CHECK(state.block.owner == nullptr, "%s has memory already",
             state.spec.name().c_str());
  move_to(state, kDirty);
  state.block = std::move(block);
  state.last_use = ++clock_;
  count_memory(state, true);
}

void Residency::Impl::start_as_zeros(StateRef ref) {
  MutexLock lock(mutex_);
  State& state = at(ref);
  ZINF_CHECK(state.place == kEmpty, "%s is %s, not empty",
             state.spec.name().c_str(), place_name(state.place).data());
  state.zeros = true;
}

void Residency::Impl::give_memory(State& state) {
  set_awaited(state, false);
  give_replaced(state);
  if (state.block.owner == nullptr) return;
  state.block = {};
  count_memory(state, false);
}

void Residency::Impl::give_replaced(State& state) {
  if (state.pins == 0 && !state.moving()) state.replaced.clear();
}

void Residency::Impl::replace(StateRef ref, Block block) {
  MutexLock lock(mutex_);
  State& state = at(ref);
  state.replaced.push_back(std::exchange(state.block, std::move(block)));
}

bool Residency::Impl::relocate(StateRef ref,
                               const std::function<bool(Block&)>& move) {
  MutexLock lock(mutex_);
  State& state = at(ref);
  return state.pins == 1 && !state.moving() && move(state.block);
}

Result<Residency::Impl::Need> Residency::Impl::try_pin(State& state, Use use) {
  ZINF_CHECK(!state.removed, "%s was removed", state.spec.name().c_str());
  bool change = use != Use::kRead;
  state.leaving = false;
  if (state.place == kFailed && use != Use::kReplace) {
    return state.error.in(state.spec.name());
  }
  if (state.place == kReading) return Need::kRead;
  if (state.place == kWriting && change) return Need::kWrite;
  bool zeros = state.place == kEmpty && state.zeros && use != Use::kReplace;
  if (state.place == kEmpty && use != Use::kReplace && !zeros) {
    return Status::error(Code::kNotFound,
                         state.spec.name() + " has no content yet");
  }
  if (state.place == kFailed) {
    ZINF_TRY(options_.backing->discard(state.below));
    state.placed = false;
  }
  if (state.place == kEmpty || state.place == kAbsent ||
      state.place == kFailed) {
    if (Status status = take_memory(state); !status.ok()) {
      if (status.code() == Code::kOverBudget) return Need::kRoom;
      return status.in(state.spec.name());
    }
    state.error = {};
    if (zeros) {
      std::memset(state.block.bytes.data(), 0, state.block.bytes.size());
      move_to(state, kDirty);
    } else if (use != Use::kReplace) {
      move_to(state, kReading);
      ++stats_.fetches;
      return Need::kLaunch;
    }
  }
  if (change && state.place != kDirty) move_to(state, kDirty);
  set_awaited(state, false);
  ++state.pins;
  if (change) ++state.writers;
  ++stats_.pins;
  return Need::kNothing;
}

Result<std::span<std::byte>> Residency::Impl::pin(StateRef ref, Use use) {
  bool waiting = false;
  while (true) {
    Need need = Need::kNothing;
    {
      MutexLock lock(mutex_);
      while (rolling_back_) changed_.wait(mutex_);
      State& state = at(ref);
      Result<Need> tried = try_pin(state, use);
      bool over = !tried.ok() || *tried == Need::kNothing;
      // What is being read for somebody who waits must not be taken away.
      if (over && waiting) --state.waiters;
      if (!over && !waiting) ++state.waiters;
      if (!over && !waiting && *tried == Need::kRead &&
          (state.move == nullptr || !state.move->done())) {
        ++stats_.late;
      }
      waiting = !over;
      if (!tried.ok()) return tried.status();
      need = *tried;
      if (need == Need::kNothing) return state.block.bytes;
    }
    Status status = provide(ref, need);
    if (!status.ok()) {
      MutexLock lock(mutex_);
      --at(ref).waiters;
      return status;
    }
  }
}

Status Residency::Impl::provide(StateRef ref, Need need) {
  Clock::time_point begin = Clock::now();
  Status status;
  if (need == Need::kLaunch) launch(ref);
  if (need == Need::kRead || need == Need::kWrite) (void)wait_for(ref);
  if (need == Need::kRoom) status = room_for(ref);
  std::uint64_t ns = ns_since(begin);
  MutexLock lock(mutex_);
  at(ref).waited_ns += ns;
  bool reading = need == Need::kLaunch || need == Need::kRead;
  (reading ? stats_.read_wait_ns : stats_.write_wait_ns) += ns;
  return status;
}

std::uint64_t Residency::Impl::make_room_for_others(std::uint64_t bytes) {
  Clock::time_point begin = Clock::now();
  std::uint64_t freed = make_room(bytes, {});
  std::uint64_t ns = ns_since(begin);
  MutexLock lock(mutex_);
  stats_.write_wait_ns += ns;
  return freed;
}

// Gives the state its memory, dropping others.
Status Residency::Impl::room_for(StateRef ref) {
  std::uint64_t bytes = 0;
  {
    MutexLock lock(mutex_);
    bytes = at(ref).spec.bytes;
  }
  if (make_room(bytes, {}) > 0) return {};
  if (options_.others && options_.others(bytes)) return {};
  // Another thread may have given some back since: the last word.
  MutexLock lock(mutex_);
  State& state = at(ref);
  return take_memory(state)
      .in(state.spec.name() +
          ": nothing more can leave memory, and it does not fit")
      .because(refusal_);
}

void Residency::Impl::unpin(StateRef ref, Use use) {
  bool write = false;
  bool removed = false;
  bool expected = false;
  {
    MutexLock lock(mutex_);
    State& state = at(ref);
    --state.pins;
    if (use != Use::kRead) --state.writers;
    state.last_use = ++clock_;
    if (state.pins > 0) return;
    give_replaced(state);
    removed = state.removed;
    if (state.leaving && !removed) {
      land_finished();
      write = leave(ref);
    }
    expected = state.next_use > now_;
  }
  if (write) launch(ref);
  if (removed) forget(ref);
  if (!expected) let_away_leave();
}

std::uint64_t Residency::Impl::away_limit_locked() const {
  std::uint64_t least = options_.away_limit_bytes;
  if (least == 0 || away_sizes_.empty()) return least;
  return std::max(least, 2 * *away_sizes_.rbegin());
}

std::uint64_t Residency::Impl::away_limit() const {
  MutexLock lock(mutex_);
  return away_limit_locked();
}

// What somebody expects is not among them: who knows the order of uses lets it
// leave, and room that is needed is taken from it too.
void Residency::Impl::let_away_leave() {
  const Goers away{.home = Home::kAway, .later_than = Goers::kNever};
  std::uint64_t excess = 0;
  bool waits = false;
  Leaving leaving;
  {
    MutexLock lock(mutex_);
    std::uint64_t limit = away_limit_locked();
    if (stats_.away_bytes - awaited_bytes_ <= limit) return;
    land_finished();
    std::uint64_t there = 0;
    std::uint64_t moving = 0;
    for (const State& state : states_) {
      if (state.block.owner == nullptr || !may_go(state, away)) continue;
      there += state.spec.bytes;
      if (state.place == kWriting && state.leaving) moving += state.spec.bytes;
    }
    if (there <= limit) return;
    excess = there - limit;
    waits = excess > limit;
    std::vector<bool> tried;
    if (!waits && moving < excess) {
      leaving = start_leaving(excess - moving, away, tried);
    }
  }
  launch_all(leaving.claimed);
  if (waits) (void)make_room(excess, away);
}

Residency::Impl::Need Residency::Impl::claim_read(StateRef ref) {
  State* state = find(ref);
  if (state == nullptr || rolling_back_ || state->place != kAbsent)
    return Need::kNothing;
  if (Status status = take_memory(*state); !status.ok()) {
    return status.code() == Code::kOverBudget ? Need::kRoom : Need::kNothing;
  }
  state->leaving = false;
  state->last_use = ++clock_;
  set_awaited(*state, true);
  move_to(*state, kReading);
  return Need::kLaunch;
}

void Residency::Impl::prefetch(StateRef ref) {
  Need need = Need::kNothing;
  {
    MutexLock lock(mutex_);
    need = claim_read(ref);
  }
  if (need == Need::kLaunch) launch(ref);
}

void Residency::Impl::expect(StateRef ref, std::uint64_t now,
                             std::uint64_t next) {
  MutexLock lock(mutex_);
  now_ = std::max(now_, now);
  if (State* state = find(ref)) state->next_use = next;
}

bool Residency::Impl::fetch(StateRef ref) {
  while (true) {
    std::uint64_t bytes = 0;
    Goers later;
    {
      MutexLock lock(mutex_);
      Need need = claim_read(ref);
      if (need == Need::kNothing) return true;
      if (need == Need::kLaunch) break;
      bytes = at(ref).spec.bytes;
      later.later_than = std::max(at(ref).next_use, now_ + 1);
    }
    if (make_room(bytes, later) == 0) return false;
  }
  launch(ref);
  return true;
}

void Residency::Impl::write(StateRef ref) {
  bool claimed = false;
  {
    MutexLock lock(mutex_);
    claimed = find(ref) != nullptr && claim_write(ref);
  }
  if (claimed) launch(ref);
}

Status Residency::Impl::write_and_wait(StateRef ref) {
  while (true) {
    write(ref);
    (void)wait_for(ref);
    MutexLock lock(mutex_);
    const State& state = at(ref);
    if (state.place == kFailed) return state.error.in(state.spec.name());
    if (state.place == kEmpty) {
      return Status::error(Code::kNotFound,
                           state.spec.name() + " has no content yet");
    }
    if (state.place != kDirty && state.place != kWriting) return {};
    if (state.writers > 0) {
      return Status::error(Code::kInvalid,
                           state.spec.name() + " is being changed");
    }
    if (!refusal_.ok()) return refusal_.in(state.spec.name());
  }
}

void Residency::Impl::evict(StateRef ref) {
  bool write = false;
  {
    MutexLock lock(mutex_);
    land_finished();
    State* state = find(ref);
    if (state == nullptr) return;
    state->leaving = true;
    write = leave(ref);
  }
  if (write) launch(ref);
}

Status Residency::Impl::leave_and_wait(StateRef ref) {
  evict(ref);
  (void)wait_for(ref);
  MutexLock lock(mutex_);
  State& state = at(ref);
  if (state.place == kAbsent) return {};
  if (state.place == kFailed) return state.error.in(state.spec.name());
  state.leaving = false;
  if (state.place == kDirty && state.pins == 0 && !refusal_.ok()) {
    return refusal_.in(state.spec.name());
  }
  return Status::error(Code::kInvalid,
                       state.spec.name() + " cannot leave memory: it is " +
                           std::string(place_name(state.place)));
}

bool Residency::Impl::idle(const State& state) const {
  return state.in_use && state.home != Home::kMemory && state.pins == 0 &&
         state.waiters == 0 && !state.removed;
}

bool Residency::Impl::claim_write(StateRef ref) {
  State& state = at(ref);
  if (state.place != kDirty || state.writers > 0 || rolling_back_) return false;
  move_to(state, kWriting);
  writing_.push_back(ref);
  return true;
}

bool Residency::Impl::leave(StateRef ref) {
  if (!idle(at(ref))) return false;
  if (at(ref).place == kResident) (void)drop(ref);
  return claim_write(ref);
}

Leave Residency::Impl::ask(StateRef ref) {
  if (!options_.leaving) return Leave::kDrop;
  State& state = at(ref);
  return options_.leaving(ref, state.owner, state.block);
}

std::uint64_t Residency::Impl::drop(StateRef ref) {
  State& state = at(ref);
  switch (ask(ref)) {
    case Leave::kKeep:
      return 0;
    case Leave::kChanged:
      move_to(state, kDirty);
      return 0;
    case Leave::kDrop:
      break;
  }
  move_to(state, kAbsent);
  give_memory(state);
  ++stats_.drops;
  return state.spec.bytes;
}

Place Residency::Impl::place(StateRef ref) const {
  MutexLock lock(mutex_);
  return const_cast<Impl*>(this)->at(ref).place;
}

std::uint32_t Residency::Impl::below(StateRef ref) const {
  MutexLock lock(mutex_);
  return const_cast<Impl*>(this)->at(ref).below;
}

Block Residency::Impl::block(StateRef ref) const {
  MutexLock lock(mutex_);
  return const_cast<Impl*>(this)->at(ref).block;
}

ResidencyStats Residency::Impl::stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

std::vector<StateSize> Residency::Impl::sizes() const {
  MutexLock lock(mutex_);
  std::vector<StateSize> sizes;
  for (const State& state : states_) {
    sizes.push_back(
        {state.spec.bytes, state.in_use ? state.home : Home::kBelow});
  }
  return sizes;
}

std::vector<StateWait> Residency::Impl::take_waits(std::size_t most) {
  MutexLock lock(mutex_);
  std::vector<StateWait> waits;
  for (State& state : states_) {
    std::uint64_t ns = std::exchange(state.waited_ns, 0);
    if (ns > 0) waits.push_back({state.spec.name(), ns});
  }
  std::ranges::sort(waits, std::ranges::greater(), &StateWait::ns);
  if (waits.size() > most) waits.resize(most);
  return waits;
}

Pin::Pin(Pin&& other) noexcept { *this = std::move(other); }

Pin& Pin::operator=(Pin&& other) noexcept {
  if (this == &other) return *this;
  if (residency_ != nullptr) residency_->impl_->unpin(state_, use_);
  residency_ = std::exchange(other.residency_, nullptr);
  state_ = other.state_;
  use_ = other.use_;
  bytes_ = std::exchange(other.bytes_, {});
  return *this;
}

Pin::~Pin() {
  if (residency_ != nullptr) residency_->impl_->unpin(state_, use_);
}

Residency::Residency(ResidencyOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}
Residency::~Residency() = default;
Result<StateRef> Residency::add(const StateSpec& spec, Home home, void* owner,
                                Worth worth) {
  return impl_->add(spec, home, owner, worth);
}
void Residency::start_as_zeros(StateRef state) { impl_->start_as_zeros(state); }
void Residency::give(StateRef state, Block block) {
  impl_->give(state, std::move(block));
}
void Residency::rename(StateRef state, const std::string& unit) {
  impl_->rename(state, unit);
}
void Residency::remove(StateRef state) { impl_->remove(state); }
Result<Pin> Residency::pin(StateRef state, Use use) {
  Pin pin;
  ZINF_ASSIGN(pin.bytes_, impl_->pin(state, use));
  pin.residency_ = this;
  pin.state_ = state;
  pin.use_ = use;
  return pin;
}
void Residency::prefetch(StateRef state) { impl_->prefetch(state); }
void Residency::expect(StateRef state, std::uint64_t now, std::uint64_t next) {
  impl_->expect(state, now, next);
}
bool Residency::fetch(StateRef state) { return impl_->fetch(state); }
void Residency::write(StateRef state) { impl_->write(state); }
Status Residency::write_and_wait(StateRef state) {
  return impl_->write_and_wait(state);
}
void Residency::evict(StateRef state) { impl_->evict(state); }
Status Residency::leave(StateRef state) { return impl_->leave_and_wait(state); }
std::uint64_t Residency::make_room(std::uint64_t bytes) {
  return impl_->make_room_for_others(bytes);
}
std::uint64_t Residency::drop_idle(std::uint64_t bytes) {
  return impl_->drop_idle(bytes);
}
Status Residency::refusal() const { return impl_->refusal(); }
Status Residency::flush() { return impl_->flush(); }
Status Residency::commit(std::uint64_t step) { return impl_->commit(step); }
Status Residency::end_step(std::uint64_t step) {
  return due(step) ? commit(step) : Status();
}
bool Residency::due(std::uint64_t step) const { return impl_->due(step); }
bool Residency::has_backing() const { return impl_->has_backing(); }
std::uint64_t Residency::away_limit() const { return impl_->away_limit(); }
Status Residency::rollback() { return impl_->rollback(); }
Place Residency::place(StateRef state) const { return impl_->place(state); }
std::uint32_t Residency::below(StateRef state) const {
  return impl_->below(state);
}
Block Residency::block(const Pin& pin) const {
  return impl_->block(pin.state_);
}
void Residency::replace(Pin& pin, Block block) {
  impl_->replace(pin.state_, std::move(block));
  renew(pin);
}
void Residency::renew(Pin& pin) const {
  pin.bytes_ = impl_->block(pin.state_).bytes;
}
bool Residency::relocate(Pin& pin, const std::function<bool(Block&)>& move) {
  bool moved = impl_->relocate(pin.state_, move);
  renew(pin);
  return moved;
}
ResidencyStats Residency::stats() const { return impl_->stats(); }
std::vector<StateSize> Residency::sizes() const { return impl_->sizes(); }
std::vector<StateWait> Residency::take_waits(std::size_t most) {
  return impl_->take_waits(most);
}

}  // namespace zinf
