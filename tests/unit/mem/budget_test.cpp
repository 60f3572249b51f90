#include "zinf/budget.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "src/base/align.h"
#include "tests/unit/mem/mem_test_util.h"

namespace zinf {
namespace {

TEST(Budget, RefusesLimitsThatMakeNoSense) {
  EXPECT_EQ(Budget::create("host", 0).status().text(),
            "budget \"host\": a limit of 0 bytes holds nothing");
  EXPECT_EQ(Budget::create("host", ~0ull).status().code(), Code::kInvalid);
  EXPECT_EQ(Budget::create("host", kAddressSpaceBytes + 1).status().code(),
            Code::kInvalid);
  EXPECT_TRUE(Budget::create("host", kAddressSpaceBytes).ok());
}

TEST(Budget, CountsByTagAndGivesBackAtDestruction) {
  Budget budget = make_budget(100);
  {
    Reservation weights = budget.reserve(Tag::kWeight, 60).value();
    Reservation grads = budget.reserve(Tag::kGrad, 40).value();
    EXPECT_EQ(budget.usage().total.used_bytes, 100u);
    EXPECT_EQ(budget.usage().of(Tag::kWeight).used_bytes, 60u);
    EXPECT_EQ(budget.usage().of(Tag::kGrad).used_bytes, 40u);
  }
  BudgetUsage usage = budget.usage();
  EXPECT_EQ(usage.limit_bytes, 100u);
  EXPECT_EQ(usage.total.used_bytes, 0u);
  EXPECT_EQ(usage.total.high_bytes, 100u);
  EXPECT_EQ(usage.of(Tag::kWeight).high_bytes, 60u);
  EXPECT_EQ(usage.of(Tag::kMoment).high_bytes, 0u);
}

TEST(Budget, RefusalNamesBudgetTagWantedAndHolders) {
  Budget budget = make_budget(4 * kKiB);
  Reservation weights = budget.reserve(Tag::kWeight, 2 * kKiB).value();
  Reservation staging = budget.reserve(Tag::kStaging, kKiB).value();
  Status status = budget.reserve(Tag::kGrad, 2 * kKiB).status();
  EXPECT_EQ(status.code(), Code::kOverBudget);
  EXPECT_EQ(status.text(),
            "budget \"host\" of 4 KiB: grad wants 2 KiB more, which needs "
            "at least 5120 bytes (5 KiB): 3 KiB is used (weight 2 KiB, staging "
            "1 KiB)");
  EXPECT_EQ(budget.usage().total.used_bytes, 3 * kKiB);
}

TEST(Budget, RefusesMoreThanTheAddressSpaceAsInvalid) {
  Budget budget = make_budget(kAddressSpaceBytes);
  Reservation one = budget.reserve(Tag::kOther, 1).value();
  EXPECT_EQ(one.grow(~0ull).code(), Code::kInvalid);
  EXPECT_EQ(one.grow(kAddressSpaceBytes).code(), Code::kOverBudget);
  EXPECT_EQ(one.bytes(), 1u);
}

TEST(BudgetWatch, KnowsTheMostSinceItWasMade) {
  Budget budget = make_budget(100);
  Reservation held = budget.reserve(Tag::kUnit, 10).value();
  auto first = std::make_unique<BudgetWatch>(budget);
  (void)budget.reserve(Tag::kTensor, 90).value();
  BudgetWatch second(budget);
  EXPECT_EQ(first->usage().total.high_bytes, 100u);
  EXPECT_EQ(first->usage().of(Tag::kTensor).high_bytes, 90u);
  EXPECT_EQ(second.usage().total.high_bytes, 10u);
  EXPECT_EQ(second.usage().of(Tag::kTensor).high_bytes, 0u);
  EXPECT_EQ(second.usage().of(Tag::kUnit).high_bytes, 10u);
  first.reset();
  (void)budget.reserve(Tag::kTensor, 30).value();
  EXPECT_EQ(second.usage().total.high_bytes, 40u);
  EXPECT_EQ(second.usage().total.used_bytes, 10u);
}

TEST(Reservation, MovesItsBytes) {
  Budget budget = make_budget(100);
  Reservation first = budget.reserve(Tag::kMaster, 30).value();
  Reservation second = std::move(first);
  EXPECT_EQ(second.bytes(), 30u);
  Reservation third = budget.reserve(Tag::kOther, 50).value();
  third = std::move(second);
  EXPECT_EQ(budget.usage().of(Tag::kOther).used_bytes, 0u);
  EXPECT_EQ(budget.usage().of(Tag::kMaster).used_bytes, 30u);
}

TEST(Reservation, OutlivesItsBudget) {
  Reservation kept;
  EXPECT_EQ(kept.grow(1).code(), Code::kInvalid);
  {
    Budget budget = make_budget(100);
    kept = budget.reserve(Tag::kWeight, 10).value();
  }
  EXPECT_TRUE(kept.grow(90).ok());
  EXPECT_EQ(kept.grow(1).code(), Code::kOverBudget);
}

TEST(Reservation, BeyondTheLimitShowsInTheUsage) {
  Budget budget = make_budget(100);
  Reservation over = budget.reserve(Tag::kTensor, 90).value();
  over.grow_beyond_limit(30);
  EXPECT_EQ(budget.usage().total.used_bytes, 120u);
  EXPECT_EQ(budget.reserve(Tag::kGrad, 1).status().code(), Code::kOverBudget);
  over.shrink(21);
  EXPECT_TRUE(budget.reserve(Tag::kGrad, 1).ok());
}

TEST(ReservationDeathTest, ShrinkingBelowZeroIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Budget budget = make_budget(100);
  Reservation held = budget.reserve(Tag::kOther, 5).value();
  EXPECT_DEATH(held.shrink(6), "gives back 6 bytes of 5");
}

RC_GTEST_PROP(Budget, FollowsTheModel,
              (const std::vector<std::pair<std::uint8_t, std::int16_t>>& ops)) {
  constexpr std::int64_t kLimit = 50'000;
  Budget budget = make_budget(kLimit);
  std::array<Reservation, kNumTags> held;
  std::array<std::int64_t, kNumTags> used{};
  std::int64_t high = 0;
  for (std::size_t i = 0; i < kNumTags; ++i) {
    held[i] = budget.reserve(static_cast<Tag>(i), 0).value();
  }
  for (auto [pick, delta] : ops) {
    std::size_t tag = pick % kNumTags;
    std::int64_t total = 0;
    for (std::int64_t bytes : used) total += bytes;
    if (delta >= 0) {
      bool fits = total + delta <= kLimit;
      RC_ASSERT(held[tag].grow(static_cast<std::uint64_t>(delta)).ok() == fits);
      if (fits) used[tag] += delta;
      high = std::max(high, total + (fits ? delta : 0));
    } else {
      auto back = std::min<std::int64_t>(-std::int64_t{delta}, used[tag]);
      held[tag].shrink(static_cast<std::uint64_t>(back));
      used[tag] -= back;
    }
    RC_ASSERT(budget.usage().by_tag[tag].used_bytes ==
              static_cast<std::uint64_t>(used[tag]));
  }
  RC_ASSERT(budget.usage().total.high_bytes ==
            static_cast<std::uint64_t>(high));
}

TEST(Budget, IsNeverCrossedByManyThreads) {
  Budget budget = make_budget(1000);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 5000; ++round) {
        Result<Reservation> held = budget.reserve(Tag::kGrad, 400);
        if (held.ok()) held->shrink(100);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.usage().total.used_bytes, 0u);
  EXPECT_EQ(budget.usage().of(Tag::kGrad).used_bytes, 0u);
  EXPECT_LE(budget.usage().total.high_bytes, 1000u);
}

}  // namespace
}  // namespace zinf
