// The machine of states in flight: one behaviour at a time on a backing that
// the test stops and starts.
#include "zinf/residency.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "src/base/mutex.h"
#include "tests/support/ok.h"
#include "tests/support/state_spec.h"

namespace zinf {
namespace {

using enum Place;
using namespace std::chrono_literals;

constexpr std::size_t kBytes = kStateBytes;

// A gate that moves wait at, shared with the test.
class Gate {
 public:
  void open(Status outcome = {}) {
    MutexLock lock(mutex_);
    outcome_ = std::move(outcome);
    open_ = true;
    changed_.notify_all();
  }
  bool is_open() {
    MutexLock lock(mutex_);
    return open_;
  }
  Status pass() {
    MutexLock lock(mutex_);
    while (!open_) changed_.wait(mutex_);
    return outcome_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool open_ ZINF_GUARDED_BY(mutex_) = false;
  Status outcome_ ZINF_GUARDED_BY(mutex_);
};

// Contents in a map; every move waits at the gate if there is one.
class GatedBacking final : public Backing {
 public:
  Result<std::uint32_t> add(const StateSpec&) override { return next_++; }
  bool in_background() const override { return true; }
  Status remove(std::uint32_t state) override {
    removed_.insert(state);
    return {};
  }
  Status discard(std::uint32_t) override { return {}; }
  bool has_content(std::uint32_t state) const override {
    return contents_.contains(state);
  }
  std::unique_ptr<Move> read(std::uint32_t state,
                             std::span<std::byte> into) override {
    return std::make_unique<Gated>(gate_, [this, state, into] {
      std::copy(contents_[state].begin(), contents_[state].end(), into.begin());
    });
  }
  std::unique_ptr<Move> write(std::uint32_t state,
                              std::span<const std::byte> from) override {
    return std::make_unique<Gated>(gate_, [this, state, from] {
      contents_[state].assign(from.begin(), from.end());
    });
  }
  bool due(std::uint64_t step) const override { return step % 2 == 0; }
  Status commit(std::uint64_t) override {
    committed_ = contents_;
    return {};
  }
  Status rollback() override {
    contents_ = committed_;
    return {};
  }

  std::shared_ptr<Gate> close() { return gate_ = std::make_shared<Gate>(); }
  void always_open() { gate_ = nullptr; }
  const std::set<std::uint32_t>& removed() const { return removed_; }
  // Content from an earlier life, for states that are added later.
  void preset(std::uint32_t state, std::byte value) {
    contents_[state].assign(kBytes, value);
  }

 private:
  class Gated final : public Move {
   public:
    Gated(std::shared_ptr<Gate> gate, std::function<void()> act)
        : gate_(std::move(gate)), act_(std::move(act)) {}
    ~Gated() override { (void)wait(); }
    bool done() override { return gate_ == nullptr || gate_->is_open(); }
    Status wait() override {
      MutexLock lock(mutex_);
      if (over_) return status_;
      over_ = true;
      if (gate_ != nullptr) status_ = gate_->pass();
      if (status_.ok()) act_();
      return status_;
    }

   private:
    const std::shared_ptr<Gate> gate_;
    const std::function<void()> act_;
    Mutex mutex_;
    bool over_ ZINF_GUARDED_BY(mutex_) = false;
    Status status_ ZINF_GUARDED_BY(mutex_);
  };

  std::shared_ptr<Gate> gate_;
  std::uint32_t next_ = 0;
  std::map<std::uint32_t, std::vector<std::byte>> contents_;
  std::map<std::uint32_t, std::vector<std::byte>> committed_;
  std::set<std::uint32_t> removed_;
};

class ResidencyTest : public testing::Test {
 protected:
  // Room for so many states of kBytes.
  explicit ResidencyTest(std::size_t room = 4)
      : budget_(ok(Budget::create("host", room * kBytes))),
        pool_(ok(SlabPool::create({.budget = &budget_}))),
        states_({.allocate = slab_memory(pool_),
                 .backing = backing_,
                 .leaving = [this](StateRef ref, void*, Block& block) {
                   if (moved_.owner != nullptr) block = std::move(moved_);
                   if (changed_.contains(ref.index)) return Leave::kChanged;
                   if (!held_.contains(ref.index)) return Leave::kDrop;
                   return Leave::kKeep;
                 }}) {}

  StateRef add(const std::string& unit, Home home = Home::kBelow) {
    return ok(states_.add(weight_spec(unit), home));
  }
  void fill(StateRef ref, int value) {
    Result<Pin> pin = states_.pin(ref, Use::kReplace);
    ASSERT_TRUE(pin.ok()) << pin.status().text();
    std::memset(pin->bytes().data(), value, kBytes);
  }
  testing::AssertionResult holds(StateRef ref, int value) {
    Result<Pin> pin = states_.pin(ref, Use::kRead);
    if (!pin.ok()) return testing::AssertionFailure() << pin.status().text();
    auto same = [&](std::byte byte) {
      return byte == static_cast<std::byte>(value);
    };
    if (std::ranges::all_of(pin->bytes(), same)) {
      return testing::AssertionSuccess();
    }
    return testing::AssertionFailure() << "other bytes";
  }
  // Each holds its number.
  std::vector<StateRef> add_filled(int count) {
    std::vector<StateRef> refs;
    for (int i = 0; i < count; ++i) {
      refs.push_back(add(std::to_string(i)));
      fill(refs.back(), i);
    }
    return refs;
  }
  StateRef add_absent(const std::string& unit, int value) {
    StateRef ref = add(unit);
    fill(ref, value);
    EXPECT_TRUE(states_.flush().ok());
    states_.evict(ref);
    EXPECT_EQ(states_.place(ref), kAbsent);
    return ref;
  }

  Budget budget_;
  SlabPool pool_;
  std::set<std::uint32_t> held_;
  std::set<std::uint32_t> changed_;
  Block moved_;  // where its owner puts the content that is to leave next
  std::shared_ptr<GatedBacking> backing_ = std::make_shared<GatedBacking>();
  Residency states_;
};

TEST(PlacesTest, OnlyTheArrowsOfTheNoteAreAllowed) {
  const std::set<std::pair<Place, Place>> arrows = {{kAbsent, kReading},
                                                    {kReading, kResident},
                                                    {kReading, kFailed},
                                                    {kReading, kAbsent},
                                                    {kResident, kDirty},
                                                    {kResident, kAbsent},
                                                    {kEmpty, kDirty},
                                                    {kAbsent, kDirty},
                                                    {kDirty, kWriting},
                                                    {kWriting, kResident},
                                                    {kWriting, kFailed},
                                                    {kWriting, kDirty},
                                                    {kFailed, kDirty},
                                                    // rollback
                                                    {kEmpty, kEmpty},
                                                    {kEmpty, kAbsent},
                                                    {kAbsent, kEmpty},
                                                    {kAbsent, kAbsent},
                                                    {kResident, kEmpty},
                                                    {kDirty, kEmpty},
                                                    {kDirty, kAbsent},
                                                    {kFailed, kEmpty},
                                                    {kFailed, kAbsent}};
  for (std::size_t from = 0; from < kNumPlaces; ++from) {
    for (std::size_t to = 0; to < kNumPlaces; ++to) {
      std::pair arrow(static_cast<Place>(from), static_cast<Place>(to));
      EXPECT_EQ(may_move(arrow.first, arrow.second), arrows.contains(arrow))
          << place_name(arrow.first) << " to " << place_name(arrow.second);
    }
  }
}

TEST_F(ResidencyTest, GoesTheWholeRound) {
  StateRef ref = add("a");
  EXPECT_EQ(states_.place(ref), kEmpty);
  EXPECT_EQ(states_.pin(ref, Use::kRead).status().code(), Code::kNotFound);
  fill(ref, 1);
  EXPECT_EQ(states_.place(ref), kDirty);
  auto gate = backing_->close();
  states_.evict(ref);
  EXPECT_EQ(states_.place(ref), kWriting);
  gate->open();
  EXPECT_EQ(states_.make_room(kBytes), kBytes);
  EXPECT_EQ(states_.place(ref), kAbsent);
  EXPECT_EQ(states_.stats().memory_bytes, 0u);
  gate = backing_->close();
  states_.prefetch(ref);
  EXPECT_EQ(states_.place(ref), kReading);
  gate->open();
  EXPECT_TRUE(holds(ref, 1));
  EXPECT_EQ(states_.place(ref), kResident);
  EXPECT_EQ(states_.stats().fetches, 0u) << "the prefetch had started it";
  states_.evict(ref);
  EXPECT_EQ(states_.place(ref), kAbsent)
      << "unchanged: dropped without a write";
  EXPECT_EQ(states_.stats().writes, 1u);
}

TEST_F(ResidencyTest, LeavingWaitsUntilTheContentIsBelowAlone) {
  StateRef ref = add("a");
  fill(ref, 1);
  EXPECT_TRUE(states_.leave(ref).ok());
  EXPECT_EQ(states_.place(ref), kAbsent);
  EXPECT_TRUE(states_.leave(ref).ok()) << "it has left already";
  {
    Pin pin = ok(states_.pin(ref, Use::kRead));
    EXPECT_EQ(states_.leave(ref).code(), Code::kInvalid) << "it is in use";
  }
  EXPECT_EQ(states_.place(ref), kResident) << "and stays after that";
  EXPECT_TRUE(states_.leave(ref).ok());
  EXPECT_EQ(states_.stats().writes, 1u);
  EXPECT_TRUE(holds(ref, 1));
}

TEST_F(ResidencyTest, WritingAndWaitingLeavesTheContentInBothPlaces) {
  StateRef ref = add("a");
  EXPECT_EQ(states_.write_and_wait(ref).code(), Code::kNotFound);
  {
    Pin pin = ok(states_.pin(ref, Use::kReplace));
    std::memset(pin.bytes().data(), 7, kBytes);
    EXPECT_EQ(states_.write_and_wait(ref).code(), Code::kInvalid);
  }
  EXPECT_TRUE(states_.write_and_wait(ref).ok());
  EXPECT_EQ(states_.place(ref), kResident);
  EXPECT_EQ(states_.stats().writes, 1u);
  EXPECT_TRUE(states_.write_and_wait(ref).ok()) << "nothing is new";
  EXPECT_EQ(states_.stats().writes, 1u);
  EXPECT_TRUE(holds(ref, 7));
  fill(ref, 8);
  auto gate = backing_->close();
  gate->open(Status::error(Code::kIo, "broken"));
  EXPECT_EQ(states_.write_and_wait(ref).code(), Code::kIo);
  backing_->always_open();
}

// Else who makes room would wait for more than is needed.
TEST_F(ResidencyTest, RoomThatAnotherThreadLandsCounts) {
  StateRef first = add("a");
  StateRef second = add("b");
  for (int round = 0; round < 10; ++round) {
    fill(first, 1);
    fill(second, 1);
    auto gate = backing_->close();
    states_.evict(first);
    auto closed = backing_->close();
    states_.evict(second);
    std::promise<void> begun;
    auto other = std::async(std::launch::async,
                            [&] { EXPECT_TRUE(states_.leave(first).ok()); });
    auto room = std::async(std::launch::async, [&] {
      begun.set_value();
      return states_.make_room(kBytes);
    });
    begun.get_future().wait();
    std::this_thread::sleep_for(20ms);  // until both wait
    gate->open();
    EXPECT_EQ(room.wait_for(10s), std::future_status::ready)
        << "it waits for the other one too, round " << round;
    closed->open();
    EXPECT_EQ(room.get(), kBytes);
  }
}

TEST_F(ResidencyTest, AReaderUsesTheCopyThatIsBeingWritten) {
  StateRef ref = add("a");
  fill(ref, 1);
  auto gate = backing_->close();
  states_.evict(ref);
  EXPECT_TRUE(holds(ref, 1)) << "without waiting: the gate is closed";
  EXPECT_EQ(states_.place(ref), kWriting);
  gate->open();
  EXPECT_EQ(states_.stats().reads, 0u);
  EXPECT_TRUE(states_.flush().ok());
  EXPECT_EQ(states_.place(ref), kResident) << "a pin takes the eviction back";
}

TEST_F(ResidencyTest, AChangeWaitsForTheWrite) {
  StateRef ref = add("a");
  fill(ref, 1);
  auto gate = backing_->close();
  states_.evict(ref);
  auto change = std::async(std::launch::async, [&] { fill(ref, 2); });
  EXPECT_EQ(change.wait_for(20ms), std::future_status::timeout);
  EXPECT_EQ(states_.place(ref), kWriting);
  backing_->always_open();
  gate->open();
  change.get();
  EXPECT_EQ(states_.place(ref), kDirty);
  EXPECT_TRUE(holds(ref, 2));
}

TEST_F(ResidencyTest, SeveralReadersShareOneRead) {
  StateRef ref = add_absent("a", 7);
  auto gate = backing_->close();
  std::vector<std::future<bool>> readers;
  for (int i = 0; i < 4; ++i) {
    readers.push_back(
        std::async(std::launch::async, [&] { return bool(holds(ref, 7)); }));
  }
  std::this_thread::sleep_for(10ms);
  gate->open();
  for (auto& reader : readers) EXPECT_TRUE(reader.get());
  EXPECT_EQ(states_.stats().reads, 1u);
}

TEST_F(ResidencyTest, AnErrorSticksUntilRollback) {
  StateRef kept = add("kept");
  fill(kept, 5);
  ASSERT_TRUE(states_.commit(1).ok());
  StateRef ref = add("a");
  fill(ref, 1);
  auto gate = backing_->close();
  states_.evict(ref);
  gate->open(Status::error(Code::kIo, "the disk is gone"));
  backing_->always_open();
  for (Use use : {Use::kRead, Use::kChange, Use::kRead}) {
    (void)states_.make_room(1);
    Status status = states_.pin(ref, use).status();
    EXPECT_EQ(status.code(), Code::kIo) << status.text();
    EXPECT_NE(status.text().find("the disk is gone"), std::string::npos);
  }
  EXPECT_EQ(states_.place(ref), kFailed);
  EXPECT_EQ(states_.commit(2).code(), Code::kIo) << "must not commit around it";
  EXPECT_TRUE(holds(kept, 5)) << "others are not touched";
  ASSERT_TRUE(states_.rollback().ok());
  EXPECT_EQ(states_.place(ref), kEmpty);
  fill(ref, 2);
  EXPECT_TRUE(states_.commit(2).ok());
  EXPECT_TRUE(holds(ref, 2));
}

TEST_F(ResidencyTest, NewContentHealsAnError) {
  StateRef ref = add("a");
  fill(ref, 1);
  auto gate = backing_->close();
  states_.evict(ref);
  gate->open(Status::error(Code::kIo, "the disk is gone"));
  backing_->always_open();
  (void)states_.make_room(1);
  EXPECT_EQ(states_.pin(ref, Use::kRead).status().code(), Code::kIo);
  fill(ref, 2);
  EXPECT_TRUE(holds(ref, 2));
  EXPECT_TRUE(states_.commit(1).ok());
}

TEST_F(ResidencyTest, WhatSomebodyWaitsForIsNotTakenAway) {
  StateRef ref = add_absent("a", 7);
  auto gate = backing_->close();
  auto reader =
      std::async(std::launch::async, [&] { return bool(holds(ref, 7)); });
  while (states_.place(ref) != kReading) std::this_thread::yield();
  EXPECT_EQ(states_.make_room(kBytes), 0u);
  gate->open();
  EXPECT_TRUE(reader.get());
  EXPECT_EQ(states_.stats().reads, 1u);
}

TEST_F(ResidencyTest, AFailedReadSticksAndGivesItsMemoryBack) {
  StateRef ref = add_absent("a", 7);
  auto gate = backing_->close();
  states_.prefetch(ref);
  EXPECT_EQ(states_.stats().memory_bytes, kBytes);
  gate->open(Status::error(Code::kCorrupt, "checksum"));
  backing_->always_open();
  EXPECT_EQ(states_.pin(ref, Use::kRead).status().code(), Code::kCorrupt);
  EXPECT_EQ(states_.pin(ref, Use::kRead).status().code(), Code::kCorrupt);
  EXPECT_EQ(states_.stats().memory_bytes, 0u);
}

TEST_F(ResidencyTest, MoreStatesThanMemoryAreServedInTurn) {
  std::vector<StateRef> refs;
  for (int i = 0; i < 20; ++i) {
    refs.push_back(add(std::to_string(i)));
    fill(refs.back(), i);
  }
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(holds(refs[i], i));
  }
  EXPECT_LE(states_.stats().memory_high_bytes, 4 * kBytes);
  EXPECT_LE(budget_.usage().total.high_bytes, 4 * kBytes);
  EXPECT_LE(states_.stats().writes, 20u) << "each changed once";
}

TEST_F(ResidencyTest, TheLongestUnusedGoesFirst) {
  std::vector<StateRef> refs = add_filled(4);
  ASSERT_TRUE(states_.flush().ok());
  EXPECT_TRUE(holds(refs[0], 0));
  EXPECT_EQ(states_.make_room(2 * kBytes), 2 * kBytes);
  EXPECT_EQ(states_.place(refs[0]), kResident);
  EXPECT_EQ(states_.place(refs[1]), kAbsent);
  EXPECT_EQ(states_.place(refs[2]), kAbsent);
  EXPECT_EQ(states_.place(refs[3]), kResident);
}

TEST_F(ResidencyTest, WhatIsUsedLastGoesFirstWhereThatIsKnown) {
  std::vector<StateRef> refs = add_filled(4);
  ASSERT_TRUE(states_.flush().ok());
  const std::vector<std::uint64_t> next = {8, 20, 5, 12};
  for (int i = 0; i < 4; ++i) states_.expect(refs[i], 1, next[i]);
  EXPECT_EQ(states_.make_room(2 * kBytes), 2 * kBytes);
  EXPECT_EQ(states_.place(refs[0]), kResident);
  EXPECT_EQ(states_.place(refs[1]), kAbsent);
  EXPECT_EQ(states_.place(refs[2]), kResident);
  EXPECT_EQ(states_.place(refs[3]), kAbsent);
}

TEST_F(ResidencyTest, WhoMakesRoomHasTheNextWrittenMeanwhile) {
  std::vector<StateRef> refs = add_filled(4);
  EXPECT_EQ(states_.make_room(kBytes), kBytes);
  EXPECT_EQ(states_.stats().writes, 4u);
  EXPECT_EQ(states_.stats().drops, 1u);
  EXPECT_EQ(states_.make_room(3 * kBytes), 3 * kBytes);
  EXPECT_EQ(states_.stats().writes, 4u) << "nothing is written twice";
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(holds(refs[i], i));
}

// A device's states are copied to the host: nothing that need not go takes its
// memory.
TEST(ResidencyAboveAnotherTest, OnlyWhatHasToGoIsCopied) {
  Budget small = ok(Budget::create("host", 2 * kBytes));
  SlabPool host_pool = ok(SlabPool::create({.budget = &small}));
  Residency host({.allocate = slab_memory(host_pool), .backing = nullptr});
  Budget budget = ok(Budget::create("device", 4 * kBytes));
  SlabPool pool = ok(SlabPool::create({.budget = &budget}));
  auto copy = [](auto to, auto from) {
    std::memcpy(to.data(), from.data(), to.size());
    return Status();
  };
  Residency device(
      {.allocate = slab_memory(pool),
       .backing = host_backing(host, {.to_device = copy, .to_host = copy})});
  std::vector<StateRef> refs;
  for (int i = 0; i < 4; ++i) {
    refs.push_back(
        ok(device.add(weight_spec(std::to_string(i)), Home::kBelow)));
    (void)ok(device.pin(refs.back(), Use::kReplace));
  }
  EXPECT_EQ(device.make_room(1), kBytes);
  EXPECT_EQ(device.stats().writes, 1u);
  for (StateRef ref : refs) EXPECT_NE(device.place(ref), kFailed);
}

TEST_F(ResidencyTest, WhatIsExpectedIsNotWrittenAheadOfNeed) {
  for (int i = 0; i < 4; ++i) {
    StateRef ref = add(std::to_string(i));
    fill(ref, i);
    states_.expect(ref, 1, 10 + i);
  }
  EXPECT_EQ(states_.make_room(kBytes), kBytes);
  EXPECT_EQ(states_.stats().writes, 1u);
}

TEST_F(ResidencyTest, AFetchTakesMemoryOnlyFromWhatIsUsedLater) {
  StateRef wanted = add_absent("wanted", 9);
  std::vector<StateRef> refs;
  for (int i = 0; i < 4; ++i) {
    refs.push_back(add(std::to_string(i)));
    fill(refs.back(), i);
    states_.expect(refs.back(), 1, 10 + i);
  }
  states_.expect(wanted, 1, 20);
  EXPECT_FALSE(states_.fetch(wanted)) << "all others are used before it";
  EXPECT_EQ(states_.place(wanted), kAbsent);
  states_.expect(wanted, 1, 12);
  EXPECT_TRUE(states_.fetch(wanted));
  EXPECT_EQ(states_.place(refs[3]), kAbsent);
  EXPECT_TRUE(holds(wanted, 9));
  EXPECT_EQ(states_.stats().fetches, 0u) << "it was under way";
  EXPECT_TRUE(holds(refs[3], 3)) << "it was written before it went";
}

TEST_F(ResidencyTest, ANameThatComesAgainHasItsIndex) {
  StateRef other = add("other");
  StateRef first = add("again");
  StateRef second = add("again");  // two of one name
  std::set<std::uint32_t> indices = {first.index, second.index};
  for (int i = 0; i < 20; ++i) {
    states_.remove(first);
    states_.remove(second);
    states_.write(first);  // nothing happens to what was removed
    states_.evict(second);
    EXPECT_TRUE(states_.fetch(first));
    first = add("again");
    second = add("again");
    EXPECT_EQ((std::set<std::uint32_t>{first.index, second.index}), indices);
  }
  EXPECT_EQ(states_.sizes().size(), 3u);
  EXPECT_EQ(states_.place(other), kEmpty);
}

TEST_F(ResidencyTest, PinsHoldAndTooManyAreRefused) {
  std::vector<Pin> pins;
  for (int i = 0; i < 4; ++i) {
    pins.push_back(ok(states_.pin(add(std::to_string(i)), Use::kReplace)));
  }
  StateRef fifth = add("fifth");
  Status status = states_.pin(fifth, Use::kReplace).status();
  EXPECT_EQ(status.code(), Code::kOverBudget) << status.text();
  EXPECT_NE(status.text().find("fifth/weight"), std::string::npos);
  EXPECT_EQ(states_.make_room(kBytes), 0u);
  pins.pop_back();
  fill(fifth, 5);
  pins.clear();
  EXPECT_TRUE(holds(fifth, 5));
}

TEST_F(ResidencyTest, AnEvictionOfAPinnedStateWaitsForThePin) {
  StateRef ref = add_absent("a", 1);
  {
    Pin pin = ok(states_.pin(ref, Use::kRead));
    states_.evict(ref);
    EXPECT_EQ(states_.place(ref), kResident);
  }
  EXPECT_EQ(states_.place(ref), kAbsent);
}

TEST_F(ResidencyTest, WhatMayNotBeDroppedStaysAtItsAddress) {
  StateRef ref = add_absent("a", 1);
  std::byte* address = ok(states_.pin(ref, Use::kRead)).bytes().data();
  held_.insert(ref.index);
  states_.evict(ref);
  EXPECT_EQ(states_.make_room(kBytes), 0u);
  EXPECT_EQ(states_.place(ref), kResident);
  ASSERT_TRUE(states_.commit(1).ok());
  fill(ref, 2);
  ASSERT_TRUE(states_.rollback().ok());
  EXPECT_TRUE(holds(ref, 1));
  EXPECT_EQ(ok(states_.pin(ref, Use::kRead)).bytes().data(), address);
}

TEST_F(ResidencyTest, WhatWasChangedWithoutAPinIsWrittenFirst) {
  StateRef ref = add_absent("a", 1);
  std::byte* address = ok(states_.pin(ref, Use::kRead)).bytes().data();
  std::memset(address, 2, kBytes);
  changed_.insert(ref.index);
  states_.evict(ref);
  EXPECT_EQ(states_.place(ref), kWriting);
  changed_.clear();
  EXPECT_EQ(states_.make_room(kBytes), kBytes);
  EXPECT_TRUE(holds(ref, 2));
}

// Memory outside of the pool, with the content of a pin.
Block copy_of(const Pin& pin) {
  auto bytes = std::make_shared<std::vector<std::byte>>(pin.bytes().begin(),
                                                        pin.bytes().end());
  return {{bytes->data(), bytes->size()}, bytes};
}

TEST_F(ResidencyTest, ReplacedMemoryStaysUntilTheLastPinEnds) {
  StateRef ref = add("a");
  fill(ref, 1);
  std::optional<Pin> other = ok(states_.pin(ref, Use::kRead));
  {
    Pin pin = ok(states_.pin(ref, Use::kChange));
    states_.replace(pin, copy_of(pin));
    EXPECT_NE(pin.bytes().data(), other->bytes().data());
    std::memset(pin.bytes().data(), 2, kBytes);
    EXPECT_EQ(other->bytes()[0], std::byte{1});
    states_.renew(*other);
    EXPECT_EQ(other->bytes().data(), pin.bytes().data());
    EXPECT_FALSE(states_.relocate(*other, [](Block&) { return true; }));
  }
  EXPECT_EQ(pool_.stats().in_use_bytes, kBytes);
  other.reset();
  EXPECT_EQ(pool_.stats().in_use_bytes, 0U);
  EXPECT_TRUE(holds(ref, 2));
}

TEST_F(ResidencyTest, AnOwnerMayMoveWhatIsToLeave) {
  StateRef ref = add("a");
  fill(ref, 1);
  ASSERT_TRUE(states_.flush().ok());
  {
    Pin pin = ok(states_.pin(ref, Use::kRead));
    moved_ = copy_of(pin);
  }
  std::memset(moved_.bytes.data(), 3, kBytes);
  changed_.insert(ref.index);
  states_.evict(ref);
  EXPECT_EQ(pool_.stats().in_use_bytes, 0U);
  changed_.clear();
  ASSERT_TRUE(states_.flush().ok());
  EXPECT_EQ(states_.place(ref), kAbsent);
  EXPECT_TRUE(holds(ref, 3));
}

TEST_F(ResidencyTest, GivenMemoryIsUsedAsItIs) {
  auto owner = std::make_shared<std::vector<std::byte>>(kBytes, std::byte{3});
  std::weak_ptr<void> alive = owner;
  StateRef ref = add("a");
  std::span<std::byte> bytes(*owner);
  states_.give(ref, {bytes, std::move(owner)});
  EXPECT_EQ(states_.place(ref), kDirty);
  EXPECT_EQ(ok(states_.pin(ref, Use::kRead)).bytes().data(), bytes.data());
  EXPECT_EQ(states_.make_room(kBytes), kBytes);
  EXPECT_TRUE(alive.expired());
  EXPECT_TRUE(holds(ref, 3));
}

TEST_F(ResidencyTest, OnlyAFewStatesOfHomesAwayStayAfterTheirPins) {
  Budget budget = ok(Budget::create("test", 16 * kBytes));
  SlabPool pool = ok(SlabPool::create({.budget = &budget}));
  Residency few({.allocate = slab_memory(pool),
                 .backing = backing_,
                 .leaving = nullptr,
                 .away_limit_bytes = 1});
  std::vector<StateRef> refs;
  for (int i = 0; i < 8; ++i) {
    refs.push_back(ok(few.add(weight_spec(std::to_string(i)), Home::kAway)));
    Pin pin = ok(few.pin(refs.back(), Use::kReplace));
    std::memset(pin.bytes().data(), i, kBytes);
    pin = {};
    EXPECT_LE(few.stats().away_bytes, 4 * kBytes) << "two, and two that leave";
  }
  EXPECT_EQ(few.away_limit(), 2 * kBytes);
  EXPECT_EQ(few.place(refs[0]), kAbsent);
  EXPECT_EQ(few.place(refs[7]), kDirty) << "the last used stays";
}

TEST_F(ResidencyTest, ALargeOneThatIsGoneMakesNoRoomForHomesAway) {
  Residency few({.allocate = slab_memory(pool_),
                 .backing = backing_,
                 .leaving = nullptr,
                 .away_limit_bytes = 1});
  StateRef large = ok(few.add(weight_spec("large", 8 * kBytes), Home::kAway));
  StateRef small = ok(few.add(weight_spec("small"), Home::kAway));
  EXPECT_EQ(few.away_limit(), 16 * kBytes);
  few.remove(large);
  EXPECT_EQ(few.away_limit(), 2 * kBytes);
  few.remove(small);
  EXPECT_EQ(few.away_limit(), 1u);
}

TEST_F(ResidencyTest, WhoeverKnowsTheNextUseDecidesWhenHomesAwayLeave) {
  Residency few({.allocate = slab_memory(pool_),
                 .backing = backing_,
                 .leaving = nullptr,
                 .away_limit_bytes = 0});
  StateRef ref = ok(few.add(weight_spec("a"), Home::kAway));
  few.expect(ref, 1, 5);
  {
    Pin pin = ok(few.pin(ref, Use::kReplace));
  }
  EXPECT_EQ(few.place(ref), kDirty);
  few.expect(ref, 5, 0);
  {
    Pin pin = ok(few.pin(ref, Use::kRead));
  }
  EXPECT_EQ(few.place(ref), kAbsent);
}

TEST_F(ResidencyTest, WhatNobodyExpectsLeavesBeforeWhatSomebodyDoes) {
  Residency few({.allocate = slab_memory(pool_),
                 .backing = backing_,
                 .leaving = nullptr,
                 .away_limit_bytes = 1});
  std::vector<StateRef> refs;
  for (int i = 0; i < 5; ++i) {
    refs.push_back(ok(few.add(weight_spec(std::to_string(i)), Home::kAway)));
    if (i < 2) few.expect(refs.back(), 1, 9);
    Pin pin = ok(few.pin(refs.back(), Use::kReplace));
    std::memset(pin.bytes().data(), i, kBytes);
  }
  EXPECT_EQ(few.place(refs[0]), kDirty);
  EXPECT_EQ(few.place(refs[1]), kDirty);
  EXPECT_NE(few.place(refs[2]), kDirty) << "the third that nobody expects";
}

TEST_F(ResidencyTest, APrefetchNeverMakesRoom) {
  StateRef ref = add_absent("a", 1);
  std::vector<StateRef> refs = add_filled(4);
  states_.prefetch(ref);
  EXPECT_EQ(states_.place(ref), kAbsent);
  EXPECT_TRUE(holds(ref, 1)) << "a pin does";
}

TEST_F(ResidencyTest, MemoryHomesStayAndGoBelowAtCommitsOnly) {
  StateRef ref = add("a", Home::kMemory);
  fill(ref, 1);
  states_.evict(ref);
  EXPECT_EQ(states_.make_room(kBytes), 0u);
  EXPECT_EQ(states_.place(ref), kDirty);
  EXPECT_TRUE(states_.end_step(1).ok()) << "not due";
  EXPECT_EQ(states_.place(ref), kDirty);
  EXPECT_TRUE(states_.end_step(2).ok());
  EXPECT_EQ(states_.place(ref), kResident);
  EXPECT_EQ(states_.stats().writes, 1u);
  fill(ref, 2);
  ASSERT_TRUE(states_.rollback().ok());
  EXPECT_TRUE(holds(ref, 1));
}

TEST_F(ResidencyTest, NothingIsCommittedOrRolledBackUnderAUser) {
  StateRef ref = add("a");
  fill(ref, 1);
  ASSERT_TRUE(states_.commit(1).ok());
  {
    Pin pin = ok(states_.pin(ref, Use::kChange));
    Status status = states_.commit(2);
    EXPECT_EQ(status.code(), Code::kInvalid);
    EXPECT_NE(status.text().find("a/weight"), std::string::npos);
    EXPECT_EQ(states_.rollback().code(), Code::kInvalid);
  }
  EXPECT_TRUE(states_.commit(2).ok());
}

TEST_F(ResidencyTest, RemovalGivesEverythingBack) {
  StateRef idle = add("idle");
  fill(idle, 1);
  states_.remove(idle);
  EXPECT_EQ(backing_->removed(), std::set<std::uint32_t>({0}));
  EXPECT_EQ(states_.stats().memory_bytes, 0u);

  StateRef busy = add("busy");
  {
    Pin pin = ok(states_.pin(busy, Use::kReplace));
    states_.remove(busy);
    std::memset(pin.bytes().data(), 1, kBytes);
    EXPECT_EQ(states_.stats().memory_bytes, kBytes);
  }
  EXPECT_EQ(states_.stats().memory_bytes, 0u);
  EXPECT_EQ(states_.stats().num_states, 0u);
  EXPECT_EQ(backing_->removed(), std::set<std::uint32_t>({0, 1}));

  StateRef moving = add("moving");
  fill(moving, 3);
  auto gate = backing_->close();
  states_.evict(moving);
  auto removal =
      std::async(std::launch::async, [&] { states_.remove(moving); });
  EXPECT_EQ(removal.wait_for(20ms), std::future_status::timeout)
      << "the disk still reads its memory";
  gate->open();
  removal.get();
  EXPECT_EQ(states_.stats().memory_bytes, 0u);
}

TEST_F(ResidencyTest, WhatTheBackingHoldsIsAbsentAtFirst) {
  backing_->preset(0, std::byte{9});
  StateRef ref = add("a");
  EXPECT_EQ(states_.place(ref), kAbsent);
  EXPECT_TRUE(holds(ref, 9));
}

TEST_F(ResidencyTest, AnEmptyStateIsPossible) {
  StateRef ref = ok(states_.add(weight_spec("none", 0), Home::kBelow));
  EXPECT_TRUE(states_.pin(ref, Use::kReplace).ok());
  EXPECT_TRUE(states_.commit(1).ok());
  EXPECT_TRUE(ok(states_.pin(ref, Use::kRead)).bytes().empty());
}

TEST(ResidencyWithoutBackingTest, KeepsInMemoryAndSaysWhatItCannot) {
  SlabPool pool = ok(SlabPool::create());
  Residency states(
      {.allocate = slab_memory(pool), .backing = nullptr, .leaving = nullptr});
  EXPECT_EQ(states.add(weight_spec("a"), Home::kBelow).status().code(),
            Code::kInvalid);
  StateRef ref = ok(states.add(weight_spec("a"), Home::kMemory));
  {
    Pin pin = ok(states.pin(ref, Use::kReplace));
  }
  EXPECT_EQ(states.commit(1).code(), Code::kUnsupported);
  EXPECT_EQ(states.rollback().code(), Code::kUnsupported);
  EXPECT_TRUE(states.end_step(1).ok());
  EXPECT_TRUE(states.pin(ref, Use::kRead).ok());
}

}  // namespace
}  // namespace zinf
