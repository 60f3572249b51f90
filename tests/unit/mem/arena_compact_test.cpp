// What fits once fits for ever: holes between blocks do not use the budget up.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "src/base/align.h"
#include "src/mem/size_class.h"
#include "tests/unit/mem/live_blocks.h"
#include "tests/unit/mem/mem_test_util.h"
#include "zinf/arena.h"

namespace zinf {
namespace {

RC_GTEST_PROP(ArenaCompact, RefusesOnlyWhatItsLivePagesLeaveNoRoomFor, ()) {
  std::vector<Op> ops = *any_ops();
  const std::size_t limit = (4 + ops.size() % 13) * kMiB + ops.size() * kPage;
  Budget budget = make_budget(limit);
  Arena arena = make_arena({.budget = &budget, .reserve_bytes = kGiB});
  LiveBlocks live;
  for (const Op& op : ops) {
    auto [number, size, pick] = op;
    if (number / 4 % 64 < 20) {
      live.free_one(pick);
      continue;
    }
    std::size_t bytes = size_of(op);
    std::size_t alignment = std::size_t{1} << (pick % 22);
    Result<void*> block = arena.try_allocate(bytes, alignment);
    std::size_t wanted =
        align_up(std::max<std::size_t>(bytes, 1), std::size_t{kPage});
    if (block.ok()) {
      live.add(*block, bytes);
    } else {
      RC_ASSERT(block.status().code() == Code::kOverBudget);
      RC_ASSERT(live.page_bytes() + wanted > limit);
    }
    ArenaStats stats = arena.stats();
    RC_ASSERT(stats.committed_bytes <= limit);
    RC_ASSERT(stats.committed_bytes >= live.total_bytes());
    RC_ASSERT(budget.usage().total.used_bytes == stats.committed_bytes);
    RC_ASSERT(stats.fresh_bytes - stats.purged_bytes == stats.committed_bytes);
  }
  while (!live.empty()) live.free_one(ops.size());
  arena.trim();
  RC_ASSERT(arena.stats().committed_bytes == 0u);
  RC_ASSERT(arena.stats().num_free_ranges == 1u);
}

TEST(ArenaCompact, TakesTheHolesBetweenLargeBlocks) {
  Budget budget = make_budget(16 * kMiB);
  Arena arena = make_arena({.budget = &budget});
  std::vector<void*> blocks;
  for (int i = 0; i < 16; ++i) {
    blocks.push_back(arena.allocate(kMiB));
    ASSERT_NE(blocks.back(), nullptr);
    Pattern::write(blocks.back(), kMiB, blocks.size());
  }
  for (std::size_t i = 0; i < blocks.size(); i += 2) Arena::free(blocks[i]);
  void* large = arena.allocate(8 * kMiB);
  ASSERT_NE(large, nullptr);
  std::memset(large, 1, 8 * kMiB);
  EXPECT_EQ(budget.usage().total.used_bytes, 16 * kMiB);
  EXPECT_EQ(arena.allocate(kPage), nullptr);
  for (std::size_t i = 1; i < blocks.size(); i += 2) {
    EXPECT_TRUE(Pattern::intact(blocks[i], kMiB, i + 1));
    Arena::free(blocks[i]);
  }
  Arena::free(large);
}

TEST(ArenaCompact, GivesBackWhatASmallerLimitLeavesNoRoomFor) {
  Budget budget = make_budget(64 * kMiB);
  Arena arena = make_arena({.budget = &budget});
  void* held = arena.allocate(100);
  arena.compact(kGiB);
  Arena::free(arena.allocate(60 * kMiB));
  budget.set_limit(4 * kMiB);
  void* small = arena.allocate(1000);
  EXPECT_NE(small, nullptr);
  EXPECT_LE(budget.usage().total.used_bytes, 4 * kMiB);
  Arena::free(small);
  Arena::free(held);
}

TEST(ArenaCompact, TakesThePagesOfSpansThatFewBlocksPin) {
  Budget budget = make_budget(16 * kMiB);
  Arena arena = make_arena({.budget = &budget});
  std::vector<void*> pins;
  std::vector<void*> blocks;
  for (std::size_t i = 1; i < kNumClasses; ++i) {
    const SizeClass& size = kSizeClasses[i];
    for (std::uint32_t n = 0; n < size.blocks; ++n) {
      void* block = arena.allocate(size.bytes);
      ASSERT_NE(block, nullptr);
      (n == size.blocks / 2 ? pins : blocks).push_back(block);
    }
    Pattern::write(pins.back(), size.bytes, i);
  }
  for (void* block : blocks) Arena::free(block);
  // A pin of n bytes touches at most one page more than n bytes fill.
  std::size_t pinned = 0;
  for (std::size_t i = 1; i < kNumClasses; ++i) {
    pinned += align_up(std::size_t{kSizeClasses[i].bytes}, kPage) + kPage;
  }
  std::size_t rest = 16 * kMiB - pinned;
  void* large = arena.allocate(rest);
  ASSERT_NE(large, nullptr);
  std::memset(large, 1, rest);
  Arena::free(large);
  // The spans serve again, and what was live has its content.
  for (std::size_t i = 1; i < kNumClasses; ++i) {
    std::size_t bytes = kSizeClasses[i].bytes;
    EXPECT_TRUE(Pattern::intact(pins[i - 1], bytes, i));
    void* block = arena.allocate(bytes);
    ASSERT_NE(block, nullptr);
    std::memset(block, 1, bytes);
    EXPECT_TRUE(Pattern::intact(pins[i - 1], bytes, i));
    Arena::free(block);
    Arena::free(pins[i - 1]);
  }
  arena.trim();
  EXPECT_EQ(budget.usage().total.used_bytes, 0u);
}

TEST(ArenaCompact, TakesWhatSleepingThreadsKeep) {
  Budget budget = make_budget(8 * kMiB);
  Arena arena = make_arena({.budget = &budget});
  std::atomic<int> stage = 0;
  std::thread sleeper([&] {
    std::vector<void*> blocks;
    for (std::size_t bytes = 4 * kKiB; bytes <= 32 * kKiB; bytes += 4 * kKiB) {
      for (int i = 0; i < 8; ++i) blocks.push_back(arena.allocate(bytes));
    }
    for (void* block : blocks) Arena::free(block);
    stage = 1;
    stage.notify_all();
    stage.wait(1);
    void* block = arena.allocate(4 * kKiB);  // its cache is whole
    EXPECT_NE(block, nullptr);
    Arena::free(block);
  });
  stage.wait(0);
  EXPECT_GT(arena.stats().cached_bytes, kMiB);
  void* large = arena.allocate(8 * kMiB);
  EXPECT_NE(large, nullptr);
  if (large != nullptr) Arena::free(large);
  stage = 2;
  stage.notify_all();
  sleeper.join();
}

TEST(ArenaCompact, ManyThreadsAtTheLimitKeepTheirContents) {
  constexpr int kThreads = 4;
  constexpr std::size_t kShare = 3 * kMiB;
  // Room for all shares, with a page more per block that a hole may cost.
  Budget budget = make_budget(kThreads * (kShare + kMiB));
  Arena arena = make_arena({.budget = &budget});
  auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    struct Held {
      void* block;
      std::size_t bytes;
      std::uint64_t seed;
    };
    std::vector<Held> held;
    std::size_t total = 0;
    for (int i = 0; i < (kSanitized ? 500 : 1500); ++i) {
      std::size_t most = random() % 2 == 0 ? 30 * kKiB : kMiB;
      std::size_t bytes = 1 + random() % most;
      while (!held.empty() &&
             (total + align_up(bytes, kPage) > kShare || held.size() > 100)) {
        std::swap(held[random() % held.size()], held.back());
        EXPECT_TRUE(Pattern::intact(held.back().block, held.back().bytes,
                                    held.back().seed));
        total -= align_up(held.back().bytes, kPage);
        Arena::free(held.back().block);
        held.pop_back();
      }
      void* block = arena.allocate(bytes);
      ASSERT_NE(block, nullptr);
      Pattern::write(block, bytes, seed + i);
      held.push_back({block, bytes, seed + static_cast<std::uint64_t>(i)});
      total += align_up(bytes, kPage);
    }
    for (const Held& each : held) Arena::free(each.block);
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) threads.emplace_back(work, 1000 * i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena.stats().live_bytes, 0u);
}

std::size_t num_mappings() {
  std::ifstream file("/proc/self/maps");
  std::string line;
  std::size_t lines = 0;
  while (std::getline(file, line)) ++lines;
  return lines;
}

TEST(ArenaCompact, NeedsFewMappingsHoweverManyPagesAreSplit) {
  constexpr std::size_t kBlocks = 24'000;  // two to a huge page; none touched
  Budget budget = make_budget(kBlocks * kMiB);
  Arena arena =
      make_arena({.budget = &budget, .reserve_bytes = 2 * kBlocks * kMiB});
  if (arena.stats().reserved_bytes < 3 * kBlocks / 2 * kMiB) {
    GTEST_SKIP() << "the system has too few addresses";
  }
  std::vector<void*> blocks;
  for (std::size_t i = 0; i < kBlocks; ++i) {
    blocks.push_back(arena.allocate(kMiB));
    ASSERT_NE(blocks.back(), nullptr);
  }
  for (std::size_t i = 0; i < kBlocks; i += 2) Arena::free(blocks[i]);
  void* large = arena.allocate(kBlocks / 2 * kMiB);
  EXPECT_NE(large, nullptr);
  EXPECT_LT(num_mappings(), 20'000u);
  for (std::size_t i = 1; i < kBlocks; i += 2) Arena::free(blocks[i]);
  Arena::free(large);
  arena.trim();
  EXPECT_LT(num_mappings(), 1'000u);
}

}  // namespace
}  // namespace zinf
