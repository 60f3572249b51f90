// What an engine takes of a disk, and what happens when it may not take more.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <vector>

#include "src/base/align.h"
#include "tests/support/ok.h"
#include "tests/support/scratch_bytes.h"
#include "tests/support/temp_dir.h"
#include "zinf/host_tier.h"

namespace zinf {
namespace {

constexpr std::size_t kBytes = 64 * kKiB;
constexpr std::size_t kOverhead = kMiB;  // of a small store, at most

class NvmeSpaceTest : public testing::Test {
 protected:
  static std::shared_ptr<HostTier> make(const HostTierOptions& options,
                                        std::uint64_t memory_bytes) {
    return ok(HostTier::create(ok(HostMemory::create(memory_bytes)), options,
                               nullptr));
  }
  HostTierOptions limited(std::uint64_t bytes) {
    return {.nvme = {{dir_.path(), bytes}}};
  }
  static StateRef add(HostTier& tier, std::size_t bytes = kBytes) {
    return ok(tier.add({.unit = "unit",
                        .state = "weight",
                        .dtype = "bytes",
                        .shape = {bytes},
                        .bytes = bytes},
                       Role::kWeight, nullptr));
  }
  static Status fill(HostTier& tier, StateRef ref, int value,
                     Use use = Use::kReplace) {
    ZINF_ASSIGN(Pin pin, tier.residency().pin(ref, use));
    std::memset(pin.bytes().data(), value, pin.bytes().size());
    return {};
  }
  static int value_of(HostTier& tier, StateRef ref) {
    Pin pin = ok(tier.residency().pin(ref, Use::kRead));
    return static_cast<int>(pin.bytes().back());
  }
  std::uint64_t on_disk() const {
    EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
    return scratch_bytes(dir_.path());
  }

  TempDir dir_;
};

TEST_F(NvmeSpaceTest, ALimitIsNeverCrossedAndNothingIsLost) {
  constexpr std::uint64_t kLimit = 3 * kMiB;
  auto tier = make(limited(kLimit), 4 * kBytes);
  std::vector<StateRef> refs;
  Status status;
  while (status.ok() && refs.size() < 1000) {
    refs.push_back(add(*tier));
    status = fill(*tier, refs.back(), static_cast<int>(refs.size()));
    ASSERT_LE(on_disk(), kLimit);
  }
  EXPECT_EQ(status.code(), Code::kOverBudget);
  for (const std::string& part :
       {std::string("nothing more can leave memory"), dir_.path(),
        std::string("needed, 3 MiB found (its limit)")}) {
    EXPECT_NE(status.text().find(part), std::string::npos) << status.text();
  }
  EXPECT_GE(refs.size(), (kLimit - kOverhead) / kBytes);
  // That one, and another to make room for the exchange of the rest.
  for (int i = 0; i < 2; ++i) {
    tier->residency().remove(refs.back());
    refs.pop_back();
  }
  for (std::size_t i = 0; i < refs.size(); ++i) {
    EXPECT_EQ(value_of(*tier, refs[i]), static_cast<int>(i + 1));
  }
  for (StateRef ref : refs) ASSERT_TRUE(fill(*tier, ref, 77).ok());
  for (StateRef ref : refs) EXPECT_EQ(value_of(*tier, ref), 77);
  tier->residency().remove(refs[0]);
  EXPECT_TRUE(fill(*tier, add(*tier), 1).ok()) << "there is room again";
  EXPECT_TRUE(tier->residency().refusal().ok());
  EXPECT_LE(on_disk(), kLimit);
}

// The states that are in memory change all the time: each has been below.
TEST_F(NvmeSpaceTest, WhatIsInMemoryNeedsNoPlaceBelow) {
  constexpr std::size_t kStates = 64;
  constexpr std::size_t kInMemory = 32;
  constexpr std::uint64_t kLimit =
      (kStates - kInMemory + 2) * kBytes + kOverhead;
  auto tier = make(limited(kLimit), kInMemory * kBytes);
  std::vector<StateRef> refs;
  for (std::size_t i = 0; i < kStates; ++i) {
    refs.push_back(add(*tier));
    Status status = fill(*tier, refs.back(), 0);
    ASSERT_TRUE(status.ok()) << status.text();
  }
  for (int round = 1; round < 50; ++round) {
    for (std::size_t i = 0; i < kStates; ++i) {
      std::size_t which = i * 13 * static_cast<std::size_t>(round) % kStates;
      int value = value_of(*tier, refs[which]);
      ASSERT_TRUE(value == round - 1 || value == round) << value;
      Status status = fill(*tier, refs[which], round, Use::kChange);
      ASSERT_TRUE(status.ok()) << status.text();
    }
    for (StateRef ref : refs) {  // those that the round did not reach
      ASSERT_TRUE(fill(*tier, ref, round).ok());
    }
  }
  for (StateRef ref : refs) EXPECT_EQ(value_of(*tier, ref), 49);
  EXPECT_LE(on_disk(), kLimit);
}

TEST_F(NvmeSpaceTest, TheLeastLimitThatAReservationTakesIsEnough) {
  constexpr std::size_t kStates = 40;
  std::uint64_t enough = kStates * kBytes + 2 * kOverhead;
  std::uint64_t refused = kStates * kBytes;
  while (enough - refused > kPage) {
    std::uint64_t limit = refused + (enough - refused) / 2;
    auto tier = make(limited(limit), 0);
    Status status = tier->reserve(kStates * kBytes, kStates);
    (status.ok() ? enough : refused) = limit;
    EXPECT_LE(on_disk(), limit);
    if (status.ok()) continue;
    EXPECT_EQ(status.code(), Code::kNoSpace);
    EXPECT_EQ(on_disk(), 0u) << "nothing is left behind";
  }
  EXPECT_LE(enough, kStates * kBytes + kOverhead);
  HostTierOptions options = limited(enough);
  options.weights = Where::kNvme;
  auto tier = make(options, 2 * kBytes);
  ASSERT_TRUE(tier->reserve(kStates * kBytes, kStates).ok());
  std::uint64_t size = on_disk();
  std::vector<StateRef> refs;
  for (std::size_t i = 0; i < kStates; ++i) {
    refs.push_back(add(*tier));
    ASSERT_TRUE(fill(*tier, refs.back(), static_cast<int>(i)).ok());
  }
  for (std::size_t i = 0; i < kStates; ++i) {
    EXPECT_EQ(tier->residency().place(refs[i]), Place::kAbsent);
    EXPECT_EQ(value_of(*tier, refs[i]), static_cast<int>(i));
  }
  EXPECT_EQ(on_disk(), size) << "what is reserved is not taken again";
}

TEST_F(NvmeSpaceTest, EachPathHasItsOwnLimit) {
  std::vector<NvmePath> paths = {{dir_.file("a"), 2 * kMiB},
                                 {dir_.file("b"), 5 * kMiB}};
  for (const NvmePath& path : paths) {
    std::filesystem::create_directory(path.path);
  }
  auto tier = make({.nvme = paths}, 2 * kBytes);
  std::vector<StateRef> refs;
  Status status;
  while (status.ok() && refs.size() < 1000) {
    refs.push_back(add(*tier));
    status = fill(*tier, refs.back(), static_cast<int>(refs.size()));
  }
  for (const NvmePath& path : paths) {
    EXPECT_NE(status.text().find(path.path), std::string::npos)
        << status.text();
    std::uint64_t bytes = scratch_bytes(path.path);
    EXPECT_LE(bytes, path.limit_bytes);
    EXPECT_GE(bytes, path.limit_bytes * 9 / 10) << path.path;
  }
  for (int i = 0; i < 2; ++i) {
    tier->residency().remove(refs.back());
    refs.pop_back();
  }
  for (std::size_t i = 0; i < refs.size(); ++i) {
    EXPECT_EQ(value_of(*tier, refs[i]), static_cast<int>(i + 1));
  }
}

TEST_F(NvmeSpaceTest, StepsAreCountedWithWhatTheyWrote) {
  HostTierOptions options = limited(0);
  options.weights = Where::kNvme;
  options.endurance_bytes = 1'000'000'000'000;
  auto tier = make(options, 0);
  StateRef ref = add(*tier);
  for (int step = 0; step < 3; ++step) {
    ASSERT_TRUE(fill(*tier, ref, step).ok());
    tier->count_step();
  }
  WearStats wear = tier->stats().wear;
  EXPECT_EQ(wear.steps, 3u);
  EXPECT_EQ(wear.bytes_per_step, kBytes);
  EXPECT_EQ(wear.endurance_bytes, options.endurance_bytes);
  EXPECT_GT(wear.tb_per_day, 0);
}

}  // namespace
}  // namespace zinf
