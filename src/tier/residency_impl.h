// The state behind a Residency.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
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
  void expect(StateRef ref, std::uint64_t now, std::uint64_t next);
  bool fetch(StateRef ref);
  void write(StateRef ref);
  Status write_and_wait(StateRef ref);
  void evict(StateRef ref);
  Status leave_and_wait(StateRef ref);
  // Which states may go to make room: all, or those with this home, or those
  // that are used later than that.
  struct Goers {
    std::optional<Home> home = {};
    std::uint64_t later_than = 0;
    // As later_than: only what nobody expects.
    static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  };
  std::uint64_t make_room(std::uint64_t bytes, const Goers& goers);
  std::uint64_t make_room_for_others(std::uint64_t bytes);
  std::uint64_t drop_idle(std::uint64_t bytes);
  Status refusal() const;
  Status flush();
  Status commit(std::uint64_t step);
  bool due(std::uint64_t step) const;
  bool has_backing() const { return options_.backing != nullptr; }
  std::uint64_t away_limit() const;
  Status rollback();
  Place place(StateRef ref) const;
  std::uint32_t below(StateRef ref) const;
  Block block(StateRef ref) const;
  void replace(StateRef ref, Block block);
  bool relocate(StateRef ref, const std::function<bool(Block&)>& move);
  ResidencyStats stats() const;
  std::vector<StateSize> sizes() const;
  std::vector<StateWait> take_waits(std::size_t most);

 private:
  struct State {
    StateSpec spec = {};
    Home home = Home::kMemory;
    Worth worth = Worth::kMiddle;
    void* owner = nullptr;
    std::uint32_t below = 0;
    Place place = Place::kEmpty;
    Block block = {};
    std::vector<Block> replaced = {};      // while somebody may use it
    std::shared_ptr<Move> move = nullptr;  // null also while it is launched
    Status error = {};                     // kFailed only
    int pins = 0;
    int writers = 0;  // of these, not Use::kRead
    int waiters = 0;  // threads in pin() that wait for it
    std::uint64_t last_use = 0;
    std::uint64_t next_use = 0;  // see expect()
    std::uint64_t waited_ns = 0;
    bool leaving = false;  // drop it when nobody uses it
    bool awaited = false;  // prefetched, and not used since
    bool zeros = false;    // when it is kEmpty, its content is zeros
    bool removed = false;
    bool placed = false;    // it has a place below, with or without content
    bool cleaning = false;  // its write is for later: see start_cleaning()
    bool in_use = false;    // else the entry is free

    bool moving() const {
      return place == Place::kReading || place == Place::kWriting;
    }
  };
  // What pin() has to do before it can try again.
  enum class Need : std::uint8_t { kNothing, kLaunch, kRead, kWrite, kRoom };

  State& at(StateRef ref) ZINF_REQUIRES(mutex_);
  void move_to(State& state, Place to) ZINF_REQUIRES(mutex_);
  // kOverBudget without an attempt to make room.
  Status take_memory(State& state) ZINF_REQUIRES(mutex_);
  void count_memory(const State& state, bool more) ZINF_REQUIRES(mutex_);
  void set_awaited(State& state, bool awaited) ZINF_REQUIRES(mutex_);
  void give_memory(State& state) ZINF_REQUIRES(mutex_);
  void give_replaced(State& state) ZINF_REQUIRES(mutex_);
  Result<Need> try_pin(State& state, Use use) ZINF_REQUIRES(mutex_);
  // To kReading if it is absent and there is memory: kLaunch.
  Need claim_read(StateRef ref) ZINF_REQUIRES(mutex_);
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
  // Null for one that was removed.
  State* find(StateRef ref) ZINF_REQUIRES(mutex_);
  // An entry for the name: the one it had before, if nobody has taken it.
  std::uint32_t entry_for(const std::string& name) ZINF_REQUIRES(mutex_);
  // Small for what is to go first.
  using Order = std::tuple<bool, bool, int, Worth, std::int64_t>;
  Order order(const State& state) const ZINF_REQUIRES(mutex_);
  // Idle states that hold memory, those that are to go first at the front.
  std::vector<StateRef> in_order(const Goers& goers) ZINF_REQUIRES(mutex_);
  std::vector<StateRef> on_their_way(Place place, const Goers& goers)
      ZINF_REQUIRES(mutex_);
  bool may_go(const State& state, const Goers& goers) const
      ZINF_REQUIRES(mutex_);
  // States on their way out: `claimed` are to be launched, `moving` are all.
  struct Leaving {
    std::vector<StateRef> claimed = {};
    std::vector<StateRef> moving = {};
  };
  // Drops or claims for writing until that gives so many bytes, each state once
  // in `tried`; dropped ones are gone.
  Leaving start_leaving(std::uint64_t bytes, const Goers& goers,
                        std::vector<bool>& tried) ZINF_REQUIRES(mutex_);

  // Claims for writing what would have to go next, as long as little is being
  // written; it stays in memory. Not what somebody expects: who knows the order
  // of uses writes it in time, or never.
  std::vector<StateRef> start_cleaning(const Goers& goers)
      ZINF_REQUIRES(mutex_);

  void launch(StateRef ref) ZINF_EXCLUDES(mutex_);
  void launch_all(const std::vector<StateRef>& refs) ZINF_EXCLUDES(mutex_);
  // A place below for what is to be written. When there is none, states in
  // memory give up theirs: what they have there is old or can be written again.
  // False: it is kDirty again.
  bool find_place(StateRef ref) ZINF_EXCLUDES(mutex_);
  std::uint64_t give_up_places(std::uint64_t bytes) ZINF_REQUIRES(mutex_);
  // Waits for the state's move, if there is one, and lands it, unless another
  // thread does. The bytes that its drop gave back.
  std::uint64_t wait_for(StateRef ref) ZINF_EXCLUDES(mutex_);
  std::uint64_t given_back(const State& state) const ZINF_REQUIRES(mutex_);
  void wait_for_all() ZINF_EXCLUDES(mutex_);
  void forget(StateRef ref) ZINF_EXCLUDES(mutex_);
  // See away_limit_bytes.
  void let_away_leave() ZINF_EXCLUDES(mutex_);
  std::uint64_t away_limit_locked() const ZINF_REQUIRES(mutex_);
  Status room_for(StateRef ref) ZINF_EXCLUDES(mutex_);
  // What pin() needs, and how long that took.
  Status provide(StateRef ref, Need need) ZINF_EXCLUDES(mutex_);

  const ResidencyOptions options_;
  mutable Mutex mutex_;  // never held while a backing moves content
  CondVar changed_;      // a move was launched, or a rollback is over
  bool rolling_back_ ZINF_GUARDED_BY(mutex_) = false;
  // Entries are used again; their addresses stay.
  std::deque<State> states_ ZINF_GUARDED_BY(mutex_);
  // Entries that are free, by the names they had.
  std::unordered_multimap<std::string, std::uint32_t> freed_
      ZINF_GUARDED_BY(mutex_);
  std::vector<StateRef> writing_ ZINF_GUARDED_BY(mutex_);  // some are over
  std::uint64_t clock_ ZINF_GUARDED_BY(mutex_) = 0;
  std::uint64_t now_ ZINF_GUARDED_BY(mutex_) = 0;            // see expect()
  std::uint64_t awaited_bytes_ ZINF_GUARDED_BY(mutex_) = 0;  // kAway only
  std::multiset<std::uint64_t> away_sizes_ ZINF_GUARDED_BY(mutex_);
  Status refusal_ ZINF_GUARDED_BY(mutex_);  // of the last find_place()
  // No place was found for cleaning, and none was given back since.
  bool full_below_ ZINF_GUARDED_BY(mutex_) = false;
  ResidencyStats stats_ ZINF_GUARDED_BY(mutex_);
};

}  // namespace zinf
