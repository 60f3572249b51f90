#include "zinf/slab.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "src/base/align.h"
#include "tests/unit/mem/mem_test_util.h"

namespace zinf {
namespace {

SlabPool make_pool(const SlabPoolOptions& options = {}) {
  return SlabPool::create(options).value();
}

TEST(SlabPool, AlignsToPagesAndLargeSlabsToHugePages) {
  SlabPool pool = make_pool();
  for (std::size_t bytes : {std::size_t{1}, kPage, kPage + 1, kMiB + 17,
                            2 * kMiB, 5 * kMiB + 4097}) {
    Slab slab = pool.acquire(bytes).value();
    EXPECT_EQ(slab.size(), bytes);
    EXPECT_TRUE(
        is_aligned(slab.data(), bytes >= kHugePage ? kHugePage : kPage));
    std::memset(slab.data(), 1, bytes);
  }
}

TEST(SlabPool, CountsExactSizesNotPowersOfTwo) {
  Budget budget = make_budget(kGiB);
  SlabPool pool = make_pool({.budget = &budget});
  Slab slab = pool.acquire(5 * kMiB + 1).value();
  EXPECT_EQ(budget.usage().of(Tag::kStaging).used_bytes, 5 * kMiB + kPage);
  EXPECT_EQ(pool.stats().in_use_bytes, 5 * kMiB + kPage);
}

TEST(SlabPool, HandsTheSameMemoryOutAgain) {
  SlabPool pool = make_pool();
  std::byte* before = nullptr;
  {
    Slab slab = pool.acquire(8 * kMiB).value();
    before = slab.data();
    before[kMiB] = std::byte{42};
  }
  EXPECT_EQ(pool.stats().idle_bytes, 8 * kMiB);
  // Seven eighths of it are enough; less would waste too much.
  Slab smaller = pool.acquire(7 * kMiB).value();
  EXPECT_EQ(smaller.data(), before);
  EXPECT_EQ(smaller.data()[kMiB], std::byte{42});
  smaller = {};
  Slab half = pool.acquire(4 * kMiB).value();
  EXPECT_NE(half.data(), before);
  EXPECT_EQ(pool.stats().num_mapped, 2u);
  EXPECT_EQ(pool.stats().num_reused, 1u);
}

TEST(SlabPool, DropsKeptSlabsBeforeItRefuses) {
  Budget budget = make_budget(10 * kMiB);
  SlabPool pool = make_pool({.budget = &budget});
  {
    Slab kept = pool.acquire(6 * kMiB).value();
  }
  EXPECT_EQ(budget.usage().total.used_bytes, 6 * kMiB);
  Slab large = pool.acquire(9 * kMiB).value();
  Result<Slab> refused = pool.acquire(2 * kMiB);
  EXPECT_EQ(refused.status().code(), Code::kOverBudget);
  EXPECT_NE(refused.status().text().find("staging wants 2 MiB"),
            std::string::npos);
  EXPECT_EQ(pool.stats().in_use_bytes, 9 * kMiB);
}

TEST(SlabPool, GivesWhatIsLeftOverOfSlabsInUseBeforeItRefuses) {
  Budget budget = make_budget(16 * kMiB);
  SlabPool pool = make_pool({.budget = &budget});
  {
    Slab kept = pool.acquire(8 * kMiB).value();
  }
  Slab smaller = pool.acquire(7 * kMiB + 1).value();
  std::memset(smaller.data(), 1, smaller.size());
  EXPECT_EQ(budget.usage().total.used_bytes, 8 * kMiB);
  Slab other = pool.acquire(9 * kMiB - kPage).value();
  EXPECT_EQ(budget.usage().total.used_bytes, 16 * kMiB);
  EXPECT_EQ(pool.stats().in_use_bytes, 16 * kMiB);
  EXPECT_EQ(smaller.data()[7 * kMiB], std::byte{1});
  EXPECT_EQ(pool.tighten(), 0u);
  smaller = {};
  other = {};
  EXPECT_EQ(pool.stats().idle_bytes, 16 * kMiB);
  pool.trim();
  EXPECT_EQ(budget.usage().total.used_bytes, 0u);
}

TEST(SlabPool, KeepsNoMoreThanItsIdleBytes) {
  SlabPool pool = make_pool({.idle_bytes = 3 * kMiB});
  std::vector<Slab> slabs;
  for (int i = 0; i < 5; ++i) slabs.push_back(pool.acquire(kMiB).value());
  slabs.clear();
  EXPECT_EQ(pool.stats().idle_bytes, 3 * kMiB);
  pool.trim();
  EXPECT_EQ(pool.stats().idle_bytes, 0u);
  EXPECT_EQ(pool.stats().in_use_high_bytes, 5 * kMiB);
}

TEST(SlabPool, RefusesNothingAndTheImpossible) {
  SlabPool pool = make_pool();
  EXPECT_EQ(pool.acquire(0).status().code(), Code::kInvalid);
  EXPECT_EQ(pool.acquire(~std::size_t{0}).status().code(), Code::kInvalid);
  EXPECT_EQ(pool.acquire(kAddressSpaceBytes + 1).status().code(),
            Code::kInvalid);
  EXPECT_FALSE(pool.acquire(kAddressSpaceBytes).ok());
}

TEST(Slab, OutlivesPoolAndBudgetAndMovesBetweenThreads) {
  std::optional<Budget> budget = make_budget(kGiB);
  Slab slab;
  {
    SlabPool pool = make_pool({.budget = &*budget});
    slab = pool.acquire(3 * kMiB).value();
  }
  EXPECT_EQ(budget->usage().total.used_bytes, 3 * kMiB);
  std::thread([moved = std::move(slab)]() mutable {
    std::memset(moved.data(), 7, moved.size());
    Slab gone = std::move(moved);
  }).join();
  EXPECT_EQ(budget->usage().total.used_bytes, 0u);
}

TEST(SlabPool, ServesManyThreads) {
  Budget budget = make_budget(16 * kMiB);
  SlabPool pool = make_pool({.budget = &budget});
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (std::size_t round = 0; round < 200; ++round) {
        Result<Slab> slab = pool.acquire((1 + (round + i) % 5) * kMiB);
        if (!slab.ok()) continue;
        Pattern::write(slab->data(), kPage, i);
        ASSERT_TRUE(Pattern::intact(slab->data(), kPage, i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.stats().in_use_bytes, 0u);
  pool.trim();
  EXPECT_EQ(budget.usage().total.used_bytes, 0u);
}

// The log line that the child wrote, or "" when locking was not refused.
std::string locking_refusal(std::FILE* log) {
  bool ran = succeeds_in_child([&] {
    dup2(fileno(log), STDERR_FILENO);
    rlimit limit{64 * kKiB, 64 * kKiB};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 1;
    // Root may lock what it likes; nobody may not.
    if (geteuid() == 0 &&
        (setgroups(0, nullptr) != 0 || setresuid(65534, 65534, 65534) != 0)) {
      return 2;
    }
    SlabPool pool = make_pool({.locking = PageLocking::kWanted});
    Slab first = pool.acquire(4 * kMiB).value();
    Slab second = pool.acquire(4 * kMiB).value();
    std::memset(first.data(), 1, first.size());
    return pool.stats().locked_bytes == 0 ? 0 : 3;
  });
  EXPECT_TRUE(ran);
  std::rewind(log);
  char text[1024] = {};
  [[maybe_unused]] std::size_t got = std::fread(text, 1, sizeof text - 1, log);
  return text;
}

TEST(SlabPool, GoesOnUnlockedWithOneLogLineWhenTheSystemForbidsLocking) {
  if (kSanitized) GTEST_SKIP() << "sanitizers make mlock do nothing";
  std::FILE* log = std::tmpfile();
  ASSERT_NE(log, nullptr);
  std::string text = locking_refusal(log);
  std::fclose(log);
  EXPECT_NE(text.find("I/O buffers are not locked in memory: mlock 4 MiB"),
            std::string::npos)
      << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
}

TEST(SlabPool, LocksWhereTheSystemAllowsIt) {
  SlabPool pool = make_pool({.locking = PageLocking::kWanted});
  {
    Slab slab = pool.acquire(16 * kPage).value();
  }
  if (pool.stats().locked_bytes == 0) GTEST_SKIP() << "not even 64 KiB";
  EXPECT_EQ(pool.stats().locked_bytes, 16 * kPage);
  pool.trim();
  EXPECT_EQ(pool.stats().locked_bytes, 0u);
}

}  // namespace
}  // namespace zinf
