#include "zinf/arena.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstring>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "src/base/align.h"
#include "src/mem/size_class.h"
#include "tests/unit/mem/live_blocks.h"
#include "tests/unit/mem/mem_test_util.h"

namespace zinf {
namespace {

TEST(SizeClass, RoundsUpByAtMostAnEighthAboveTheAlignment) {
  for (std::size_t bytes = 0; bytes <= kMaxSmallBytes; ++bytes) {
    std::size_t held = kSizeClasses[size_class_of(bytes)].bytes;
    ASSERT_GE(held, bytes);
    ASSERT_TRUE(is_aligned(held, kMinAlignment));
    ASSERT_TRUE(bytes <= 512 || held - bytes <= bytes / 8);
  }
  for (const SizeClass& c : std::span(kSizeClasses).subspan(1)) {
    EXPECT_LE(c.granules * kGranule - c.blocks * c.bytes,
              c.granules * kGranule / 16);
  }
}

RC_GTEST_PROP(Arena, FollowsTheModel, ()) {
  std::vector<Op> ops = *any_ops();
  Budget budget = make_budget(32 * kMiB);
  Arena arena = make_arena({.budget = &budget, .reserve_bytes = 48 * kMiB});
  LiveBlocks live;
  for (const Op& op : ops) {
    auto [number_of_kind, size, pick] = op;
    std::uint32_t kind = number_of_kind / 4 % 64;
    if (kind == 0) {
      arena.trim();
    } else if (kind < 28) {
      live.free_one(pick);
    } else {
      std::size_t alignment = std::size_t{1} << (pick % 22);
      Result<void*> block = arena.try_allocate(size_of(op), alignment);
      if (!block.ok()) {
        RC_ASSERT(block.status().code() == Code::kOverBudget);
        continue;
      }
      RC_ASSERT(is_aligned(*block, std::max<std::size_t>(alignment, 64)));
      RC_ASSERT(arena.owns(*block));
      live.add(*block, size_of(op));
    }
    ArenaStats stats = arena.stats();
    RC_ASSERT(stats.live_bytes >= live.total_bytes());
    RC_ASSERT(stats.committed_bytes >= stats.live_bytes);
    RC_ASSERT(budget.usage().total.used_bytes == stats.committed_bytes);
    RC_ASSERT(stats.fresh_bytes - stats.purged_bytes == stats.committed_bytes);
  }
  while (!live.empty()) live.free_one(ops.size());
  RC_ASSERT(arena.stats().live_bytes == 0u);
  arena.trim();
  RC_ASSERT(arena.stats().committed_bytes == 0u);
  RC_ASSERT(arena.stats().num_free_ranges == 1u);
}

TEST(Arena, ServesZeroBytesAndKeepsEverythingAligned) {
  Arena arena = make_arena();
  std::vector<void*> blocks;
  for (std::size_t bytes : {0, 0, 1, 63, 64, 65, 4097, 32768, 32769, 3000000}) {
    blocks.push_back(arena.allocate(bytes));
    ASSERT_NE(blocks.back(), nullptr);
    EXPECT_TRUE(is_aligned(blocks.back(), bytes > kMaxSmallBytes ? kPage : 64));
  }
  EXPECT_NE(blocks[0], blocks[1]);
  for (void* block : blocks) Arena::free(block);
  Arena::free(nullptr);
}

TEST(Arena, RefusesAbsurdRequestsClearly) {
  Arena arena = make_arena();
  for (std::size_t bytes : {~std::size_t{0}, ~std::size_t{0} - 5000,
                            std::size_t{kAddressSpaceBytes} + 1}) {
    EXPECT_EQ(arena.try_allocate(bytes).status().code(), Code::kInvalid);
    EXPECT_EQ(arena.allocate(bytes), nullptr);
  }
  EXPECT_EQ(arena.try_allocate(kAddressSpaceBytes).status().code(),
            Code::kOverBudget);
  for (std::size_t alignment : {std::size_t{0}, std::size_t{3}, 4 * kMiB}) {
    EXPECT_EQ(arena.try_allocate(100, alignment).status().code(),
              Code::kInvalid);
  }
  EXPECT_EQ(Arena::create({.reserve_bytes = ~std::size_t{0}}).status().code(),
            Code::kInvalid);
}

TEST(Arena, FitsLargeBlocksExactly) {
  Arena arena = make_arena();
  // 17 MiB + 4 KiB would be 32 MiB in powers of two.
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) {
    blocks.push_back(arena.allocate(17 * kMiB + kPage));
  }
  EXPECT_LE(arena.stats().committed_bytes, 8 * (17 * kMiB + kPage) + kHugePage);
  for (void* block : blocks) Arena::free(block);
}

TEST(Arena, GivesPagesBackOnDemand) {
  Arena arena = make_arena();
  constexpr std::size_t kBytes = 32 * kMiB;
  void* block = arena.allocate(kBytes);
  std::memset(block, 1, kBytes);
  EXPECT_EQ(resident_bytes(block, kBytes), kBytes);
  Arena::free(block);
  EXPECT_EQ(arena.stats().committed_bytes, kBytes);
  EXPECT_EQ(arena.trim(), kBytes);
  EXPECT_EQ(resident_bytes(block, kBytes), 0u);
  EXPECT_EQ(arena.stats().committed_bytes, 0u);
}

TEST(Arena, PurgesFreePagesRatherThanGrow) {
  Arena arena = make_arena();
  // Two halves that are never live together need the memory of one, although
  // the second does not fit into the holes of the first.
  std::vector<void*> small;
  for (int i = 0; i < 64; ++i) small.push_back(arena.allocate(2 * kMiB));
  for (std::size_t i = 0; i < small.size(); i += 2) Arena::free(small[i]);
  void* large = arena.allocate(64 * kMiB);
  ArenaStats stats = arena.stats();
  EXPECT_EQ(stats.live_high_bytes, 128 * kMiB);
  EXPECT_LE(stats.committed_high_bytes, 134 * kMiB);
  EXPECT_GE(stats.purged_bytes, 58 * kMiB);
  Arena::free(large);
  for (std::size_t i = 1; i < small.size(); i += 2) Arena::free(small[i]);
}

TEST(Arena, GetsHugePagesWhereTheSystemGivesThem) {
  constexpr std::size_t kBytes = 32 * kMiB;
  auto* control =
      static_cast<std::byte*>(mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(control, MAP_FAILED);
  madvise(control, 2 * kBytes, MADV_HUGEPAGE);
  for (std::size_t at = 0; at < 2 * kBytes; at += kPage) control[at] = {};
  std::size_t control_huge = huge_bytes_at(control);
  munmap(control, 2 * kBytes);
  if (control_huge < kBytes) GTEST_SKIP() << "the system gives no huge pages";
  Arena arena = make_arena();
  void* block = arena.allocate(kBytes);
  std::memset(block, 1, kBytes);
  EXPECT_GE(huge_bytes_at(block), kBytes / 2);
  Arena::free(block);
}

TEST(Arena, BlocksOutliveTheirArena) {
  Budget budget = make_budget(kGiB);
  std::vector<void*> blocks;
  {
    Arena arena = make_arena({.budget = &budget});
    for (std::size_t bytes : {100, 100, 5000, 40000, 3000000}) {
      blocks.push_back(arena.allocate(bytes));
    }
  }
  for (void* block : blocks) {
    std::memset(block, 3, 100);
    EXPECT_GT(budget.usage().total.used_bytes, 0u);
    Arena::free(block);
  }
  EXPECT_EQ(budget.usage().total.used_bytes, 0u);
}

TEST(Arena, ManyComeAndGoInTheSamePlace) {
  for (int round = 0; round < 50; ++round) {
    Arena first = make_arena();
    Arena second = make_arena();
    void* a = first.allocate(200);
    void* b = second.allocate(200);
    EXPECT_TRUE(first.owns(a) && !first.owns(b) && second.owns(b));
    Arena::free(round % 2 != 0 ? a : b);
    Arena moved = std::move(first);
    Arena::free(round % 2 != 0 ? b : a);
  }
}

TEST(Arena, NinthIsRefused) {
  std::vector<Arena> arenas;
  for (int i = 0; i < 8; ++i) arenas.push_back(make_arena());
  EXPECT_EQ(Arena::create().status().code(), Code::kUnsupported);
  arenas.pop_back();
  EXPECT_TRUE(Arena::create().ok());
}

class ArenaDeathTest : public testing::Test {
 protected:
  ArenaDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  Arena arena_ = make_arena({.reserve_bytes = 64 * kMiB});
};

TEST_F(ArenaDeathTest, DoubleFreeIsNoticed) {
  EXPECT_DEATH(
      {
        void* block = arena_.allocate(100);
        void* other = arena_.allocate(100);
        Arena::free(block);
        Arena::free(other);
        Arena::free(block);
      },
      "it is free already");
  EXPECT_DEATH(
      {
        void* block = arena_.allocate(kMiB);
        Arena::free(block);
        Arena::free(block);
      },
      "no live block begins there");
}

TEST_F(ArenaDeathTest, ForeignPointersAreNoticed) {
  int local = 0;
  EXPECT_DEATH(Arena::free(&local), "it is in no arena");
  EXPECT_DEATH(Arena::free(static_cast<char*>(arena_.allocate(kMiB)) + kPage),
               "no live block begins there");
}

TEST_F(ArenaDeathTest, UseAfterFreeIsSeenByAddressSanitizer) {
#if defined(__SANITIZE_ADDRESS__)
  for (std::size_t bytes : {std::size_t{100}, kMiB}) {
    EXPECT_DEATH(
        {
          auto* block = static_cast<volatile char*>(arena_.allocate(bytes));
          Arena::free(const_cast<char*>(block));
          block[50] = 1;
        },
        "use-after-poison");
  }
#else
  GTEST_SKIP() << "built without AddressSanitizer";
#endif
}

}  // namespace
}  // namespace zinf
