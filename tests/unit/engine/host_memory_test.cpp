// One budget for tensors and states.
#include "zinf/host_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "src/base/align.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"
#include "zinf/host_tier.h"

namespace zinf {
namespace {

constexpr std::size_t kBytes = 2 * kMiB;

class HostMemoryTest : public testing::Test {
 protected:
  std::shared_ptr<HostTier> tier(const std::shared_ptr<HostMemory>& memory) {
    return ok(HostTier::create(memory, {.nvme = {{dir_.path()}}}, nullptr));
  }
  static StateRef add(HostTier& tier, int value, Role role = Role::kWeight) {
    StateSpec spec{.unit = std::to_string(value),
                   .state = std::string(role_name(role)),
                   .dtype = "bytes",
                   .shape = {kBytes},
                   .bytes = kBytes};
    StateRef ref = ok(tier.add(spec, role, nullptr));
    Pin pin = ok(tier.residency().pin(ref, Use::kReplace));
    std::memset(pin.bytes().data(), value, kBytes);
    return ref;
  }
  static int value_of(HostTier& tier, StateRef ref) {
    Pin pin = ok(tier.residency().pin(ref, Use::kRead));
    return static_cast<int>(pin.bytes()[kBytes - 1]);
  }
  static bool in_memory(HostTier& tier, StateRef ref) {
    Place place = tier.residency().place(ref);
    return place == Place::kResident || place == Place::kDirty ||
           place == Place::kWriting;
  }

  TempDir dir_;
};

TEST_F(HostMemoryTest, TensorsMakeStatesLeave) {
  auto memory = ok(HostMemory::create(8 * kBytes));
  auto states = tier(memory);
  std::vector<StateRef> refs;
  for (int i = 0; i < 8; ++i) refs.push_back(add(*states, i));
  void* tensor = ok(memory->arena().try_allocate(3 * kBytes));
  EXPECT_LE(states->stats().residency.memory_bytes, 5 * kBytes);
  EXPECT_LE(memory->budget().usage().total.high_bytes, 8 * kBytes);
  Arena::free(tensor);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(value_of(*states, refs[i]), i);
  EXPECT_LE(memory->budget().usage().total.high_bytes, 8 * kBytes);
}

TEST_F(HostMemoryTest, StatesTakeWhatTensorsHaveLeft) {
  auto memory = ok(HostMemory::create(4 * kBytes));
  auto states = tier(memory);
  Arena::free(ok(memory->arena().try_allocate(4 * kBytes)));
  std::vector<StateRef> refs;
  for (int i = 0; i < 4; ++i) refs.push_back(add(*states, i));
  EXPECT_EQ(states->stats().residency.writes, 0u) << "nothing had to leave";
  EXPECT_LE(memory->budget().usage().total.high_bytes, 4 * kBytes);
}

TEST_F(HostMemoryTest, StatesTakeTheHolesBetweenTensors) {
  auto memory = ok(HostMemory::create(4 * kBytes));
  auto states = tier(memory);
  std::vector<void*> tensors;
  for (int i = 0; i < 8; ++i) {
    tensors.push_back(ok(memory->arena().try_allocate(kBytes / 2)));
  }
  for (std::size_t i = 0; i < 8; i += 2) Arena::free(tensors[i]);
  StateRef one = add(*states, 1);
  StateRef two = add(*states, 2);
  Pin first = ok(states->residency().pin(one, Use::kRead));
  Pin second = ok(states->residency().pin(two, Use::kRead));
  EXPECT_EQ(static_cast<int>(first.bytes()[0]), 1);
  EXPECT_EQ(static_cast<int>(second.bytes()[0]), 2);
  EXPECT_LE(memory->budget().usage().total.high_bytes, 4 * kBytes);
  for (std::size_t i = 1; i < 8; i += 2) Arena::free(tensors[i]);
}

TEST_F(HostMemoryTest, EnginesShareIt) {
  auto memory = ok(HostMemory::create(4 * kBytes));
  auto one = tier(memory);
  std::vector<StateRef> refs;
  for (int i = 0; i < 4; ++i) refs.push_back(add(*one, i));
  auto other = tier(memory);
  void* tensor = ok(memory->arena().try_allocate(kBytes));
  StateRef second = add(*other, 9);
  EXPECT_LE(memory->budget().usage().total.high_bytes, 4 * kBytes);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(value_of(*one, refs[i]), i);
  EXPECT_EQ(value_of(*other, second), 9);
  Arena::free(tensor);
}

TEST_F(HostMemoryTest, ATensorThatNeverFitsIsRefusedAndNothingIsLost) {
  auto memory = ok(HostMemory::create(4 * kBytes));
  auto states = tier(memory);
  StateRef ref = add(*states, 7);
  Result<void*> tensor = memory->arena().try_allocate(5 * kBytes);
  EXPECT_EQ(tensor.status().code(), Code::kOverBudget);
  EXPECT_EQ(value_of(*states, ref), 7);
}

TEST_F(HostMemoryTest, AGiverIsAskedUntilItsHandleGoes) {
  auto memory = ok(HostMemory::create(4 * kBytes));
  int asked = 0;
  auto giver = memory->add_giver([&](std::uint64_t) -> std::uint64_t {
    ++asked;
    return 0;
  });
  (void)memory->arena().try_allocate(5 * kBytes);
  EXPECT_GT(asked, 0);
  giver.reset();
  int before = asked;
  (void)memory->arena().try_allocate(5 * kBytes);
  EXPECT_EQ(asked, before);
}

TEST_F(HostMemoryTest, ALimitMayChange) {
  auto memory = ok(HostMemory::create(0));
  void* tensor = ok(memory->arena().try_allocate(4 * kBytes));
  memory->set_limit(2 * kBytes);
  EXPECT_FALSE(memory->arena().try_allocate(8 * kBytes).ok());
  Arena::free(tensor);
  memory->set_limit(16 * kBytes);
  Arena::free(ok(memory->arena().try_allocate(8 * kBytes)));
}

// Optimizer states go first, the last used first; then weights, the longest
// unused first; then gradients.
TEST_F(HostMemoryTest, StatesLeaveInTheOrderOfTheirWorth) {
  auto memory = ok(HostMemory::create(0));
  auto states = tier(memory);
  StateRef grad = add(*states, 1, Role::kGrad);
  StateRef weight1 = add(*states, 2, Role::kWeight);
  StateRef weight2 = add(*states, 3, Role::kWeight);
  StateRef moment1 = add(*states, 4, Role::kState);
  StateRef moment2 = add(*states, 5, Role::kState);
  for (StateRef next : {moment2, moment1, weight1, weight2, grad}) {
    EXPECT_TRUE(in_memory(*states, next));
    EXPECT_GE(memory->make_room(1), kBytes);
    EXPECT_FALSE(in_memory(*states, next));
  }
  EXPECT_EQ(memory->make_room(1), 0u);
}

// The same work with the measured limit goes through, with less it does not.
TEST_F(HostMemoryTest, MeasuringFindsTheLeastLimit) {
  auto memory = ok(HostMemory::create(0));
  auto states = tier(memory);
  std::vector<StateRef> refs;
  for (int i = 0; i < 4; ++i) refs.push_back(add(*states, i));
  auto work = [&]() -> Status {
    ZINF_ASSIGN(void* tensor, memory->arena().try_allocate(3 * kBytes));
    std::unique_ptr<void, void (*)(void*)> held(tensor, &Arena::free);
    for (int i = 0; i + 1 < 4; ++i) {
      ZINF_ASSIGN(Pin one, states->residency().pin(refs[i], Use::kChange));
      ZINF_ASSIGN(Pin two, states->residency().pin(refs[i + 1], Use::kRead));
    }
    return {};
  };
  memory->start_measuring(64 * kBytes);
  EXPECT_TRUE(work().ok());
  EXPECT_TRUE(memory->reserve(Tag::kOther, 2 * kBytes).ok()) << "no more";
  std::uint64_t least = memory->stop_measuring();
  EXPECT_EQ(least, 5 * kBytes);
  EXPECT_EQ(memory->budget().usage().limit_bytes, kAddressSpaceBytes);
  memory->make_room(kAddressSpaceBytes);
  memory->trim();
  memory->set_limit(least - kPage);
  EXPECT_EQ(work().code(), Code::kOverBudget);
  memory->set_limit(least);
  EXPECT_TRUE(work().ok());
}

TEST_F(HostMemoryTest, MeasuringEndsAtTheMost) {
  auto memory = ok(HostMemory::create(0));
  memory->start_measuring(4 * kBytes);
  memory->set_limit(8 * kBytes);  // for afterwards
  EXPECT_FALSE(memory->arena().try_allocate(5 * kBytes).ok());
  EXPECT_FALSE(memory->reserve(Tag::kOther, 5 * kBytes).ok());
  EXPECT_TRUE(memory->reserve(Tag::kOther, 3 * kBytes).ok());
  EXPECT_EQ(memory->stop_measuring(), 3 * kBytes);
  EXPECT_EQ(memory->budget().usage().limit_bytes, 8 * kBytes);
}

}  // namespace
}  // namespace zinf
