// What an arena does when a budget, its addresses or the system say no.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <string>
#include <vector>

#include "src/base/align.h"
#include "tests/unit/mem/mem_test_util.h"
#include "zinf/arena.h"

namespace zinf {
namespace {

TEST(ArenaLimits, BudgetRefusalIsAValueAndHarmless) {
  Budget budget = make_budget(8 * kMiB);
  Arena arena = make_arena({.budget = &budget, .tag = Tag::kTensor});
  void* held = arena.allocate(6 * kMiB);
  ASSERT_NE(held, nullptr);
  Result<void*> refused = arena.try_allocate(4 * kMiB);
  EXPECT_EQ(refused.status().code(), Code::kOverBudget);
  EXPECT_NE(refused.status().text().find("budget \"host\" of 8 MiB: tensor "
                                         "wants 4 MiB more"),
            std::string::npos)
      << refused.status().text();
  EXPECT_EQ(arena.allocate(4 * kMiB), nullptr);
  void* small = arena.allocate(100);
  EXPECT_NE(small, nullptr);
  // Now 8 MiB are committed; a freed block's pages pay for the next one.
  Arena::free(held);
  void* next = arena.allocate(5 * kMiB);
  EXPECT_NE(next, nullptr);
  Arena::free(next);
  Arena::free(small);
}

TEST(ArenaLimits, SmallBlocksAreRefusedTooAndComeBackAfterwards) {
  Budget budget = make_budget(4 * kMiB);
  Arena arena = make_arena({.budget = &budget});
  std::vector<void*> blocks;
  while (void* block = arena.allocate(1000)) blocks.push_back(block);
  EXPECT_GT(blocks.size(), 3900u);
  EXPECT_EQ(arena.try_allocate(1000).status().code(), Code::kOverBudget);
  for (void* block : blocks) Arena::free(block);
  arena.trim();
  EXPECT_EQ(budget.usage().total.used_bytes, 0u);
  EXPECT_EQ(budget.usage().total.high_bytes, 4 * kMiB);
}

TEST(ArenaLimits, PressureCallbackMakesRoom) {
  Budget budget = make_budget(8 * kMiB);
  std::vector<void*> cached;
  int calls = 0;
  auto evict = [&](std::size_t wanted) {
    EXPECT_EQ(wanted, 8 * kMiB);
    ++calls;
    if (cached.empty()) return false;
    Arena::free(cached.back());
    cached.pop_back();
    return true;
  };
  Arena arena = make_arena({.budget = &budget, .on_pressure = evict});
  for (int i = 0; i < 3; ++i) cached.push_back(arena.allocate(2 * kMiB));
  void* block = arena.allocate(7 * kMiB);
  EXPECT_NE(block, nullptr);
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(arena.allocate(7 * kMiB), nullptr);
  EXPECT_EQ(calls, 5) << "before it compacts, and after";
  Arena::free(block);
}

TEST(ArenaLimits, CallbackThatMakesNoRoomDoesNotHang) {
  Budget budget = make_budget(2 * kMiB);
  auto lie = [](std::size_t) { return true; };
  Arena arena = make_arena({.budget = &budget, .on_pressure = lie});
  EXPECT_EQ(arena.allocate(4 * kMiB), nullptr);
}

TEST(ArenaLimits, ExceedsTheBudgetOnlyWhenAskedTo) {
  Budget budget = make_budget(4 * kMiB);
  Arena arena = make_arena({.budget = &budget});
  EXPECT_EQ(arena.allocate(6 * kMiB), nullptr);
  void* block = arena.allocate_beyond_budget(6 * kMiB).value();
  EXPECT_EQ(budget.usage().total.used_bytes, 6 * kMiB);
  Arena::free(block);
  arena.trim();
  EXPECT_EQ(budget.usage().total.used_bytes, 0u);
}

TEST(ArenaLimits, ExhaustionOfAddressesIsAValue) {
  Arena arena = make_arena({.reserve_bytes = 16 * kMiB});
  std::vector<void*> blocks;
  while (void* block = arena.allocate(kMiB)) blocks.push_back(block);
  EXPECT_EQ(blocks.size(), 16u);
  Status status = arena.try_allocate(kMiB).status();
  EXPECT_EQ(status.code(), Code::kOverBudget);
  EXPECT_EQ(status.text(),
            "arena of 16 MiB: no free range for 1 MiB (16 MiB is used)");
  for (void* block : blocks) Arena::free(block);
}

TEST(ArenaLimits, TakesWhatAnAddressSpaceLimitLeaves) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need the address space";
  EXPECT_TRUE(succeeds_in_child([] {
    rlimit limit{512 * kMiB, 512 * kMiB};
    if (setrlimit(RLIMIT_AS, &limit) != 0) return 1;
    Arena arena = make_arena();
    std::size_t reserved = arena.stats().reserved_bytes;
    if (reserved > 256 * kMiB || reserved < 64 * kMiB) return 2;
    void* block = arena.allocate(reserved / 2);
    if (block == nullptr) return 3;
    std::memset(block, 1, reserved / 2);
    if (arena.allocate(reserved) != nullptr) return 4;
    // The rest of the process still has addresses.
    std::vector<char> other(32 * kMiB, 1);
    return other[kMiB] == 1 ? 0 : 5;
  }));
}

TEST(ArenaLimits, HalvesAReserveThatTheSystemRefuses) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need the address space";
  EXPECT_TRUE(succeeds_in_child([] {
    rlimit limit{512 * kMiB, 512 * kMiB};
    if (setrlimit(RLIMIT_AS, &limit) != 0) return 1;
    Arena arena = make_arena({.reserve_bytes = 64 * kGiB});
    std::size_t reserved = arena.stats().reserved_bytes;
    return reserved >= 128 * kMiB && reserved < 512 * kMiB ? 0 : 2;
  }));
}

TEST(ArenaLimits, SystemThatGivesNoMemoryIsAValue) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need the address space";
  EXPECT_TRUE(succeeds_in_child([] {
    Arena arena = make_arena();
    rlimit limit{64 * kMiB, 64 * kMiB};  // of writable private memory
    if (setrlimit(RLIMIT_DATA, &limit) != 0) return 1;
    Status status = arena.try_allocate(256 * kMiB).status();
    if (status.code() != Code::kOverBudget) return 2;
    return status.text().find("Cannot allocate memory") != std::string::npos
               ? 0
               : 3;
  }));
}

}  // namespace
}  // namespace zinf
