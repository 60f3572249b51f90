// Moves ahead of uses: steps of a small training, on a real disk.
#include "src/engine/mover.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "src/base/align.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"
#include "zinf/host_tier.h"

namespace zinf {
namespace {

constexpr std::size_t kBytes = 512 * kKiB;
constexpr std::uint32_t kLayers = 16;

// Weights and their states; every byte says how often it was updated.
class Training {
 public:
  Training(const std::string& nvme, std::uint64_t room,
           HostTierOptions options = {})
      : memory_(ok(HostMemory::create(room))) {
    options.nvme = {{nvme}};
    tier_ = ok(HostTier::create(memory_, options, nullptr));
    for (std::uint32_t i = 0; i < kLayers; ++i) {
      weights_.push_back(add(i, "weight", Role::kWeight));
      states_.push_back(add(i, "moment", Role::kState));
    }
  }

  void forward(std::uint32_t layers = kLayers) {
    for (std::uint32_t i = 0; i < layers; ++i) read(weights_[i]);
  }
  void backward() {
    for (std::uint32_t i = kLayers; i-- > 0;) {
      read(weights_[i]);
      update(i);
    }
    ++step_;
  }
  void step() {
    forward();
    backward();
    tier_->count_step();
  }
  // Between two uses there is some time, in which moves can be made.
  void set_compute(std::chrono::microseconds time) { compute_ = time; }

  std::uint64_t bytes_moved() const {
    ResidencyStats stats = tier_->residency().stats();
    return stats.bytes_read + stats.bytes_written;
  }
  HostTier& tier() { return *tier_; }
  StateRef weight(std::uint32_t layer) const { return weights_[layer]; }

 private:
  StateRef add(std::uint32_t layer, const char* name, Role role) {
    StateSpec spec{.unit = std::to_string(layer),
                   .state = name,
                   .dtype = "bytes",
                   .shape = {kBytes},
                   .bytes = kBytes};
    StateRef ref = ok(tier_->add(spec, role, nullptr));
    Pin pin = ok(tier_->residency().pin(ref, Use::kReplace));
    std::memset(pin.bytes().data(), 0, kBytes);
    return ref;
  }
  void check(const Pin& pin) const {
    std::vector<std::byte> wanted(kBytes, std::byte(step_));
    ASSERT_EQ(std::memcmp(pin.bytes().data(), wanted.data(), kBytes), 0)
        << "step " << step_;
  }
  void read(StateRef ref) {
    StateUse use{ref.index, UseKind::kRead};
    tier_->announce({&use, 1});
    check(ok(tier_->residency().pin(ref, Use::kRead)));
    std::this_thread::sleep_for(compute_);
  }
  void update(std::uint32_t layer) {
    std::vector<StateUse> uses = {{weights_[layer].index, UseKind::kChange},
                                  {states_[layer].index, UseKind::kChange}};
    tier_->announce(uses);
    for (StateRef ref : {weights_[layer], states_[layer]}) {
      Pin pin = ok(tier_->residency().pin(ref, Use::kChange));
      check(pin);
      std::memset(pin.bytes().data(), static_cast<int>(step_ + 1), kBytes);
    }
    std::this_thread::sleep_for(compute_);
  }

  std::shared_ptr<HostMemory> memory_;
  std::shared_ptr<HostTier> tier_;
  std::vector<StateRef> weights_;
  std::vector<StateRef> states_;
  std::uint8_t step_ = 0;
  std::chrono::microseconds compute_{0};
};

// Room for so many of the states, and for what the mover leaves free.
constexpr std::uint64_t room_for(std::uint64_t states) {
  return states * kBytes + 4 * kMiB;
}

class MoverTest : public testing::Test {
 protected:
  TempDir dir_;
};

TEST_F(MoverTest, ContentsAreRightWithEveryRoom) {
  for (std::uint64_t states : {3, 5, 8, 12, 17, 23, 31, 40}) {
    Training training(dir_.path(), room_for(states));
    for (int i = 0; i < 8; ++i) training.step();
    EXPECT_EQ(training.tier().stats().mover.steps, 8u);
    EXPECT_LE(training.tier().memory().budget().usage().total.high_bytes,
              room_for(states));
  }
}

TEST_F(MoverTest, MovesNoMoreThanPlanned) {
  for (std::uint64_t states : {4, 10, 18}) {
    Training training(dir_.path(), room_for(states));
    training.set_compute(std::chrono::milliseconds(1));
    // Plans are made after 1, 2, 4, 8 and 16 steps; a step leads from one to
    // the next.
    for (int i = 0; i < 9; ++i) training.step();
    std::uint64_t before = training.bytes_moved();
    for (int i = 0; i < 4; ++i) training.step();
    std::uint64_t per_step = (training.bytes_moved() - before) / 4;
    std::uint64_t planned = training.tier().stats().mover.forecast_bytes;
    EXPECT_GT(planned, 0u);
    EXPECT_LE(per_step, planned + planned / 20) << states << " states";
    // Two reads and a write of every weight, one of each of every state.
    EXPECT_LE(planned, 5 * kLayers * kBytes);
  }
}

TEST_F(MoverTest, ReadsAreUnderWayBeforeTheyAreNeeded) {
  Training training(dir_.path(), room_for(10));
  training.set_compute(std::chrono::milliseconds(2));
  for (int i = 0; i < 4; ++i) training.step();
  ResidencyStats before = training.tier().stats().residency;
  for (int i = 0; i < 4; ++i) training.step();
  ResidencyStats after = training.tier().stats().residency;
  EXPECT_GT(after.reads - before.reads, 4u * kLayers);
  EXPECT_LT(after.fetches - before.fetches, (after.reads - before.reads) / 4);
  EXPECT_EQ(training.tier().stats().mover.deviations, 0u);
}

TEST_F(MoverTest, WhatIsForcedOutIsMovedAheadToo) {
  Training training(
      dir_.path(), room_for(40),
      {.weights = Where::kNvme, .states = Where::kNvme, .away_bytes = kMiB});
  training.set_compute(std::chrono::milliseconds(2));
  for (int i = 0; i < 4; ++i) training.step();
  ResidencyStats before = training.tier().stats().residency;
  std::uint64_t moved = training.bytes_moved();
  for (int i = 0; i < 4; ++i) training.step();
  ResidencyStats after = training.tier().stats().residency;
  EXPECT_LT(after.fetches - before.fetches, (after.reads - before.reads) / 4);
  // There is room for all of them, but they leave: two reads and a write of a
  // weight, one of each of a state, save for the few that are kept.
  std::uint64_t per_step = (training.bytes_moved() - moved) / 4;
  EXPECT_LE(per_step, 5 * kLayers * kBytes);
  EXPECT_GE(per_step, 5 * (kLayers - 4) * kBytes);
}

TEST_F(MoverTest, WithoutItEveryReadIsWaitedFor) {
  Training training(dir_.path(), room_for(10), {.prefetch = false});
  for (int i = 0; i < 3; ++i) training.step();
  ResidencyStats stats = training.tier().stats().residency;
  EXPECT_EQ(stats.fetches, stats.reads);
  EXPECT_GT(stats.read_wait_ns, 0u);
  StepStats step = training.tier().stats().step;
  EXPECT_EQ(step.fetches, step.reads);
  EXPECT_GT(step.read_wait_seconds, 0);
  EXPECT_EQ(step.waits.size(), 5u);
}

TEST_F(MoverTest, OtherUsesInBetweenCostNoTrace) {
  Training training(dir_.path(), room_for(10));
  for (int i = 0; i < 3; ++i) training.step();
  for (int i = 0; i < 6; ++i) {
    training.forward(i % 2 == 0 ? kLayers : kLayers / 2);  // an evaluation
    training.step();
  }
  EXPECT_GT(training.tier().stats().mover.deviations, 0u);
  std::uint64_t before = training.tier().stats().mover.deviations;
  for (int i = 0; i < 3; ++i) training.step();
  EXPECT_LE(training.tier().stats().mover.deviations, before + 3 * 5 * kLayers);
}

TEST_F(MoverTest, WhatIsRemovedIsNotMoved) {
  Training training(dir_.path(), room_for(10));
  for (int i = 0; i < 3; ++i) training.step();
  training.forward(kLayers / 2);
  for (std::uint32_t i = 0; i < kLayers; ++i) {
    training.tier().residency().remove(training.weight(i));
  }
  EXPECT_EQ(training.tier().stats().residency.num_states, kLayers);
}

TEST_F(MoverTest, RestsWhileMeasured) {
  Training training(dir_.path(), room_for(10));
  for (int i = 0; i < 3; ++i) training.step();
  training.tier().start_measuring(room_for(100));
  training.step();
  EXPECT_GT(training.tier().stop_measuring(), 0u);
  EXPECT_EQ(training.tier().stats().mover.steps, 3u);
  training.step();
  EXPECT_EQ(training.tier().stats().mover.steps, 4u);
}

TEST_F(MoverTest, StepsThatNeverEndAreBounded) {
  Training training(dir_.path(), room_for(40));
  for (std::uint32_t i = 0; i < 2 << 16; ++i) {
    StateUse use{training.weight(i % kLayers).index, UseKind::kRead};
    training.tier().announce({&use, 1});
  }
  EXPECT_EQ(training.tier().stats().mover.steps, 2u);
  training.forward();
}

}  // namespace
}  // namespace zinf
