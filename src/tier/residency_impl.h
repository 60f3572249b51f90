// The state behind a Residency.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/base/mutex.h"
#include "zinf/residency.h"

namespace zinf {

// A move is claimed under the lock (the state's place says so), launched
// without it, because a backing may be slow to take it, and landed under it
// again by whoever learns first that it is over.
class Residency::Impl {
 public:
  explicit Impl(ResidencyOptions options) : options_(std::move(options)) {}
  ~Impl();

  Result<StateRef> add(const StateSpec& spec, Home home, void* owner,
                       Worth worth);
  void give(StateRef ref, Block block);
  void rename(StateRef ref, const std::string& unit);
  void start_as_zeros(StateRef ref);
  void remove(StateRef ref);
  Result<std::span<std::byte>> pin(StateRef ref, Use use);
  void unpin(StateRef ref, Use use);
  void prefetch(StateRef ref);
  void evict(StateRef ref);
  // Of states with that home only, or of all that can go.
  std::uint64_t make_room(std::uint64_t bytes, std::optional<Home> home = {});
  Status refusal() const;
  Status flush();
  Status commit(std::uint64_t step);
  bool due(std::uint64_t step) const;
  bool has_backing() const { return options_.backing != nullptr; }
  Status rollback();
  Place place(StateRef ref) const;
  Block block(StateRef ref) const;
  ResidencyStats stats() const;

 private:
  struct State {
    StateSpec spec = {};
    Home home = Home::kMemory;
    Worth worth = Worth::kMiddle;
    void* owner = nullptr;
    std::uint32_t below = 0;
    Place place = Place::kEmpty;
    Block block = {};
    std::shared_ptr<Move> move = nullptr;  // null also while it is launched
    Status error = {};                     // kFailed only
    int pins = 0;
    int writers = 0;  // of these, not Use::kRead
    int waiters = 0;  // threads in pin() that wait for it
    std::uint64_t last_use = 0;
    bool leaving = false;  // drop it when nobody uses it
    bool awaited = false;  // prefetched, and not used since
    bool zeros = false;    // when it is kEmpty, its content is zeros
    bool removed = false;
    bool placed = false;  // it has a place below, with or without content
    bool in_use = false;  // else the entry is free

    bool moving() const {
      return place == Place::kReading || place == Place::kWriting;
    }
  };
  // What pin() has to do before it can try again.
  enum class Need : std::uint8_t { kNothing, kLaunch, kWait, kRoom };

  State& at(StateRef ref) ZINF_REQUIRES(mutex_);
  void move_to(State& state, Place to) ZINF_REQUIRES(mutex_);
  // kOverBudget without an attempt to make room.
  Status take_memory(State& state) ZINF_REQUIRES(mutex_);
  void count_memory(const State& state, bool more) ZINF_REQUIRES(mutex_);
  void set_awaited(State& state, bool awaited) ZINF_REQUIRES(mutex_);
  void give_memory(State& state) ZINF_REQUIRES(mutex_);
  Result<Need> try_pin(State& state, Use use) ZINF_REQUIRES(mutex_);
  // To kWriting, if it is kDirty and nobody is changing it.
  bool claim_write(StateRef ref) ZINF_REQUIRES(mutex_);
  // Towards the drop; true when a write was claimed.
  bool leave(StateRef ref) ZINF_REQUIRES(mutex_);
  // Whether it is not needed in memory now: nobody uses it, its home is below.
  bool idle(const State& state) const ZINF_REQUIRES(mutex_);
  Leave ask(StateRef ref) ZINF_REQUIRES(mutex_);
  // The bytes given back: 0 when it may not go.
  std::uint64_t drop(StateRef ref) ZINF_REQUIRES(mutex_);
  std::uint64_t land(StateRef ref, const Status& outcome) ZINF_REQUIRES(mutex_);
  void land_finished() ZINF_REQUIRES(mutex_);
  static std::pair<Worth, std::int64_t> order(const State& state);
  // Idle states in that place, those that are to go first at the front.
  std::vector<StateRef> by_worth(Place place, std::optional<Home> home)
      ZINF_REQUIRES(mutex_);

  void launch(StateRef ref) ZINF_EXCLUDES(mutex_);
  // A place below for what is to be written. When there is none, states in
  // memory give up theirs: what they have there is old or can be written again.
  // False: it is kDirty again.
  bool find_place(StateRef ref) ZINF_EXCLUDES(mutex_);
  std::uint64_t give_up_places(std::uint64_t bytes) ZINF_REQUIRES(mutex_);
  // Waits for the state's move, if there is one, and lands it. The bytes that
  // its drop gave back.
  std::uint64_t wait_for(StateRef ref) ZINF_EXCLUDES(mutex_);
  void wait_for_all() ZINF_EXCLUDES(mutex_);
  void forget(StateRef ref) ZINF_EXCLUDES(mutex_);
  Status room_for(StateRef ref) ZINF_EXCLUDES(mutex_);

  const ResidencyOptions options_;
  mutable Mutex mutex_;  // never held while a backing moves content
  CondVar changed_;      // a move was launched, or a rollback is over
  bool rolling_back_ ZINF_GUARDED_BY(mutex_) = false;
  // Entries are used again; their addresses stay.
  std::deque<State> states_ ZINF_GUARDED_BY(mutex_);
  std::vector<std::uint32_t> free_ ZINF_GUARDED_BY(mutex_);
  std::vector<StateRef> writing_ ZINF_GUARDED_BY(mutex_);  // some are over
  std::uint64_t clock_ ZINF_GUARDED_BY(mutex_) = 0;
  std::uint64_t awaited_bytes_ ZINF_GUARDED_BY(mutex_) = 0;  // kAway only
  Status refusal_ ZINF_GUARDED_BY(mutex_);  // of the last find_place()
  std::uint64_t refusals_ ZINF_GUARDED_BY(mutex_) = 0;
  ResidencyStats stats_ ZINF_GUARDED_BY(mutex_);
};

}  // namespace zinf
