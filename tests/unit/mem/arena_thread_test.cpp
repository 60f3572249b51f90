// Threads, their end, and fork.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <latch>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "src/base/align.h"
#include "src/base/mutex.h"
#include "tests/support/sanitized.h"
#include "tests/unit/mem/mem_test_util.h"
#include "zinf/arena.h"

namespace zinf {
namespace {

struct Item {
  void* block = nullptr;
  std::size_t bytes = 0;
};

class Queue {
 public:
  void push(Item item) {
    MutexLock lock(mutex_);
    items_.push_back(item);
    ready_.notify_one();
  }
  Item pop() {
    MutexLock lock(mutex_);
    while (items_.empty()) ready_.wait(mutex_);
    Item item = items_.front();
    items_.pop_front();
    return item;
  }

 private:
  Mutex mutex_;
  CondVar ready_;
  std::deque<Item> items_ ZINF_GUARDED_BY(mutex_);
};

std::size_t random_size(std::minstd_rand& random) {
  switch (random() % 8) {
    case 0:
      return random() % (256 * kKiB);
    case 1:
    case 2:
      return random() % (32 * kKiB);
    default:
      return random() % 1024;
  }
}

TEST(ArenaThreads, BlocksAreFreedByOtherThreads) {
  constexpr int kItems = kSanitized ? 5000 : 30000;
  Arena arena = make_arena();
  Queue queue;
  std::vector<std::thread> threads;
  std::atomic<int> broken = 0;
  for (unsigned i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      std::minstd_rand random(i + 1);
      for (int n = 0; n < kItems; ++n) {
        Item item{nullptr, random_size(random)};
        item.block = arena.allocate(item.bytes);
        Pattern::write(item.block, item.bytes, item.bytes);
        queue.push(item);
      }
    });
    threads.emplace_back([&] {
      for (int n = 0; n < kItems; ++n) {
        Item item = queue.pop();
        if (!Pattern::intact(item.block, item.bytes, item.bytes)) ++broken;
        Arena::free(item.block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(broken, 0);
  EXPECT_EQ(arena.stats().live_bytes, 0u);
  EXPECT_EQ(arena.stats().cached_bytes, 0u);
  arena.trim();
  EXPECT_EQ(arena.stats().committed_bytes, 0u);
}

TEST(ArenaThreads, EndingThreadGivesItsCacheBack) {
  Arena arena = make_arena();
  std::vector<void*> left;
  std::thread([&] {
    std::vector<void*> blocks;
    for (std::size_t i = 0; i < 500; ++i) blocks.push_back(arena.allocate(i));
    for (void* block : blocks) Arena::free(block);
    left.push_back(arena.allocate(100));
    EXPECT_GT(arena.stats().cached_bytes, 0u);
  }).join();
  EXPECT_EQ(arena.stats().cached_bytes, 0u);
  EXPECT_EQ(arena.stats().live_bytes, 128u);
  EXPECT_EQ(arena.stats().num_spans, 1u);
  Arena::free(left[0]);
}

// Its destructor runs at the thread's end, before or after the cache's.
struct FreesLate {
  std::vector<void*> blocks;
  Arena* arena = nullptr;
  ~FreesLate() {
    for (void* block : blocks) Arena::free(block);
    if (arena != nullptr) Arena::free(arena->allocate(64));
  }
};

TEST(ArenaThreads, BlocksAreServedWhileAThreadEnds) {
  Arena arena = make_arena();
  std::thread([&] {
    static thread_local FreesLate late;  // made first, destroyed last
    late.arena = &arena;
    late.blocks.push_back(arena.allocate(64));
    late.blocks.push_back(arena.allocate(100'000));
  }).join();
  EXPECT_EQ(arena.stats().live_bytes, 0u);
  EXPECT_EQ(arena.stats().cached_bytes, 0u);
}

TEST(ArenaThreads, ArenaMayGoWhileThreadsFreeItsBlocks) {
  Budget budget = make_budget(kGiB);
  for (int round = 0; round < 100; ++round) {
    std::optional<Arena> arena =
        make_arena({.budget = &budget, .reserve_bytes = 64 * kMiB});
    std::vector<std::thread> threads;
    std::latch start(3);
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] {
        std::vector<void*> blocks;
        for (std::size_t n = 0; n < 100; ++n) {
          blocks.push_back(arena->allocate(n * 400));
        }
        for (std::size_t n = 0; n < 50; ++n) Arena::free(blocks[n]);
        start.arrive_and_wait();
        for (std::size_t n = 50; n < 100; ++n) Arena::free(blocks[n]);
      });
    }
    start.arrive_and_wait();
    arena.reset();
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(budget.usage().total.used_bytes, 0u) << "round " << round;
  }
}

TEST(ArenaThreads, CacheOfALivingThreadDoesNotKeepAnArena) {
  Budget budget = make_budget(kGiB);
  std::optional<Arena> arena = make_arena({.budget = &budget});
  std::latch cached(1);
  std::latch next_arena(1);
  std::thread thread([&] {
    for (std::size_t bytes = 0; bytes < 30'000; bytes += 500) {
      Arena::free(arena->allocate(bytes));
    }
    cached.count_down();
    next_arena.wait();
    // The same place, another generation: the old cache is not touched.
    Arena::free(arena->allocate(500));
  });
  cached.wait();
  EXPECT_GT(arena->stats().cached_bytes, 0u);
  arena.reset();
  EXPECT_EQ(budget.usage().total.used_bytes, 0u);
  arena = make_arena({.budget = &budget});
  next_arena.count_down();
  thread.join();
  EXPECT_EQ(arena->stats().cached_bytes, 0u);
}

// What the child of a fork does; 0 when all went well.
int use_arena_in_child(Arena& arena, const Item& inherited) {
  if (!Pattern::intact(inherited.block, inherited.bytes, 7)) return 1;
  Pattern::write(inherited.block, inherited.bytes, 8);  // its own copy
  std::minstd_rand random(5);
  std::vector<Item> items;
  for (int i = 0; i < 300; ++i) {
    std::size_t bytes = random_size(random);
    items.push_back({arena.allocate(bytes), bytes});
    if (items.back().block == nullptr) return 2;
    Pattern::write(items.back().block, bytes, bytes);
  }
  for (const Item& item : items) {
    if (!Pattern::intact(item.block, item.bytes, item.bytes)) return 3;
    Arena::free(item.block);
  }
  Arena::free(inherited.block);
  arena.trim();
  return 0;
}

TEST(ArenaThreads, ChildOfABusyProcessAllocatesAndFrees) {
  if (kSanitizerHangsAfterFork) {
    GTEST_SKIP() << "in a forked child ASan's own allocator may wait for a "
                    "lock that a thread of the parent has held";
  }
  Budget budget = make_budget(kGiB);
  Arena arena = make_arena({.budget = &budget});
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      std::minstd_rand random(i + 1);
      std::vector<void*> blocks(64);
      while (!stop) {
        void*& block = blocks[random() % blocks.size()];
        Arena::free(block);
        block = arena.allocate(random_size(random));
      }
      for (void* block : blocks) Arena::free(block);
    });
  }
  Item inherited{arena.allocate(300'000), 300'000};
  Pattern::write(inherited.block, inherited.bytes, 7);
  for (int round = 0; round < (kSanitized ? 5 : 30); ++round) {
    EXPECT_TRUE(succeeds_in_child(
        [&] { return use_arena_in_child(arena, inherited); }));
  }
  EXPECT_TRUE(Pattern::intact(inherited.block, inherited.bytes, 7));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  Arena::free(inherited.block);
  EXPECT_EQ(arena.stats().live_bytes, 0u);
}

}  // namespace
}  // namespace zinf
