// A store that is made larger while it is used.
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <thread>
#include <utility>

#include "tests/support/store_fixture.h"

namespace zinf {
namespace {

using StoreGrowth = StoreTest;

TEST_F(StoreGrowth, AReservedStoreHasRoomForMore) {
  StoreOptions with = options();
  with.paths = {{.path = "fast", .weight = 3}, {.path = "slow", .weight = 1}};
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", 2 * kMiB);
  ASSERT_TRUE(put(*store, a, 2 * kMiB, 1).ok());
  ASSERT_TRUE(store->commit(1).ok());
  EXPECT_EQ(store->define(spec("b", 6 * kMiB)).status().code(), Code::kNoSpace);

  Status grown = store->reserve(8 * kMiB, 20);
  ASSERT_TRUE(grown.ok()) << grown.text();
  with.state_bytes = 8 * kMiB;
  with.num_states = 20;
  EXPECT_GE(store->stats().capacity_bytes, with.data_bytes());
  EXPECT_LE(store->stats().capacity_bytes, with.data_bytes() + 8 * 4096);
  StateId b = define(*store, "b", 6 * kMiB);
  // All that Note [Versions and space] promises: kept, and a step on top.
  for (std::uint64_t step = 2; step < 6; ++step) {
    for (auto [id, bytes] : {std::pair{a, 2 * kMiB}, std::pair{b, 6 * kMiB}}) {
      Status status = put(*store, id, bytes, step + id.index);
      ASSERT_TRUE(status.ok()) << status.text();
    }
    ASSERT_TRUE(store->commit(step).ok());
    ASSERT_TRUE(step != 2 || store->keep("two").ok());
  }
  std::vector<std::uint64_t> put_bytes = store->stats().volume_bytes_put;
  EXPECT_NEAR(
      static_cast<double>(put_bytes[0]) / static_cast<double>(put_bytes[1]), 3,
      0.3);
  std::uint64_t capacity = store->stats().capacity_bytes;
  ASSERT_TRUE(store->reserve(kMiB, 30).ok());  // never less than now
  EXPECT_EQ(store->stats().state_bytes, 8 * kMiB);
  EXPECT_EQ(store->stats().num_states, 30u);
  EXPECT_GE(store->stats().capacity_bytes, capacity);
  EXPECT_EQ(store->reserve(std::uint64_t{1} << 62, 1).code(), Code::kInvalid);
  capacity = store->stats().capacity_bytes;
  store.reset();
  store = made(Store::open(with));
  EXPECT_EQ(store->stats().capacity_bytes, capacity);
  EXPECT_EQ(store->stats().num_states, 30u);
  EXPECT_TRUE(holds(*store, b, 6 * kMiB, 5 + b.index));
}

// From a store for nothing, state by state; the metadata must grow too.
TEST_F(StoreGrowth, AStoreGrowsStateByState) {
  StoreOptions with = options();
  with.state_bytes = 0;
  with.num_states = 0;
  with.block_bytes = 4096;
  with.durability = Durability::every_step();
  auto store = made(Store::create(with));
  std::vector<StateId> ids;
  constexpr std::size_t kStates = 300;
  for (std::size_t i = 0; i < kStates; ++i) {
    Status grown = store->reserve((i + 1) * 3 * 4096, i + 1);
    ASSERT_TRUE(grown.ok()) << i << ": " << grown.text();
    // Long names: tables of more than the metadata had room for at first.
    ids.push_back(
        define(*store, std::string(300, 'x') + std::to_string(i), 3 * 4096));
    ASSERT_TRUE(put(*store, ids.back(), 3 * 4096, i).ok());
    if (i % 10 == 0) {
      Status committed = store->commit(i);
      ASSERT_TRUE(committed.ok()) << i << ": " << committed.text();
    }
  }
  ASSERT_TRUE(store->commit(kStates).ok());
  store.reset();
  store = made(Store::open(with));
  for (std::size_t i = 0; i < kStates; ++i) {
    ASSERT_TRUE(holds(*store, ids[i], 3 * 4096, i));
  }
  EXPECT_TRUE(store->verify()->empty());
}

TEST_F(StoreGrowth, GrowthBeyondALimitIsRefusedAndChangesNothing) {
  StoreOptions with = on_disk();
  with.paths = {{.path = dir_.file("a"), .limit_bytes = 20 * kMiB, .weight = 1},
                {.path = dir_.file("b"), .limit_bytes = 4 * kMiB, .weight = 1}};
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", kMiB);
  ASSERT_TRUE(put(*store, a, kMiB, 1).ok());
  ASSERT_TRUE(store->commit(1).ok());
  auto size = [&](const char* path) {
    return std::filesystem::file_size(dir_.file(path) + "/volume.zinf");
  };
  std::uint64_t before_a = size("a");
  std::uint64_t before_b = size("b");
  StoreStats before = store->stats();
  Status refused = store->reserve(20 * kMiB, 8);
  EXPECT_EQ(refused.code(), Code::kNoSpace);
  EXPECT_NE(refused.text().find("/a: "), std::string::npos) << refused.text();
  EXPECT_NE(refused.text().find("4 MiB found"), std::string::npos)
      << refused.text();
  EXPECT_EQ(size("a"), before_a);
  EXPECT_EQ(size("b"), before_b);
  EXPECT_EQ(store->stats().capacity_bytes, before.capacity_bytes);
  EXPECT_EQ(store->stats().state_bytes, before.state_bytes);

  Status grown = store->reserve(8 * kMiB, 8);  // the rest falls to the other
  ASSERT_TRUE(grown.ok()) << grown.text();
  EXPECT_LE(size("b"), 4 * kMiB);
  EXPECT_GT(size("a"), 12 * kMiB);
  EXPECT_LE(size("a"), 20 * kMiB);
  StateId b = define(*store, "b", 7 * kMiB);
  ASSERT_TRUE(put(*store, b, 7 * kMiB, 2).ok());
  std::uint64_t after_a = size("a");
  ASSERT_TRUE(store->commit(2).ok());
  EXPECT_EQ(size("a"), after_a);
  struct stat info{};
  ASSERT_EQ(stat(dir_.file("a/volume.zinf").c_str(), &info), 0);
  EXPECT_GE(static_cast<std::uint64_t>(info.st_blocks) * 512, after_a);
  EXPECT_TRUE(holds(*store, a, kMiB, 1));
  EXPECT_TRUE(holds(*store, b, 7 * kMiB, 2));
}

TEST_F(StoreGrowth, ADiskThatRefusesToGrowAVolumeChangesNothing) {
  StoreOptions with = options();
  with.paths = {
      {.path = "one", .weight = 1},
      {.path = "two",
       .weight = 1,
       .faults = {{.on = io::Operation::kResize, .errnum = ENOSPC, .nth = 1}}}};
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", kMiB);
  ASSERT_TRUE(put(*store, a, kMiB, 1).ok());
  ASSERT_TRUE(store->commit(1).ok());
  std::uint64_t before = volume_bytes("one");
  StoreStats stats = store->stats();
  Status refused = store->reserve(20 * kMiB, 8);
  EXPECT_EQ(refused.code(), Code::kNoSpace);
  EXPECT_NE(refused.text().find("two/volume.zinf"), std::string::npos)
      << refused.text();
  EXPECT_EQ(volume_bytes("one"), before);
  EXPECT_EQ(store->stats().capacity_bytes, stats.capacity_bytes);
  EXPECT_TRUE(put(*store, a, kMiB, 2).ok());
  EXPECT_TRUE(store->commit(2).ok());
  EXPECT_TRUE(store->reserve(20 * kMiB, 8).ok());
  EXPECT_GT(volume_bytes("one"), before);
}

TEST_F(StoreGrowth, ThreadsShareAStoreWhileItGrows) {
  StoreOptions with = on_disk();
  with.paths = {{.path = dir_.file("a"), .weight = 1},
                {.path = dir_.file("b"), .weight = 1}};
  with.state_bytes = 0;
  with.num_states = 0;
  with.verify = Verify::kAlways;
  auto store = made(Store::create(with));
  constexpr std::size_t kThreads = 3;
  constexpr std::uint64_t kBytes = 100'000;
  std::atomic<std::uint64_t> reserved = 0;  // states that there is room for
  std::vector<std::thread> threads;
  std::vector<int> good(kThreads, 0);
  auto work = [&](std::size_t t) {
    std::string name = "t" + std::to_string(t) + ".";
    for (std::uint64_t round = 0; round < 8; ++round) {
      std::uint64_t all = reserved += 1;
      if (!store->reserve(all * kBytes, all).ok()) return;
      Result<StateId> id =
          store->define(spec(name + std::to_string(round), kBytes));
      if (!id.ok() || !put(*store, *id, kBytes, t * 100 + round).ok() ||
          !holds(*store, *id, kBytes, t * 100 + round)) {
        return;
      }
      if (round % 3 == 2 && !store->remove(*id).ok()) return;
      ++good[t];
    }
  };
  for (std::size_t t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
  for (std::uint64_t step = 1; step <= 8; ++step) {
    Status status = store->commit(step);
    EXPECT_TRUE(status.ok()) << status.text();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, std::vector<int>(kThreads, 8));
  ASSERT_TRUE(store->commit(9).ok());
  store.reset();
  store = made(Store::open(with));
  EXPECT_EQ(store->states().size(), kThreads * 6);
  for (std::size_t t = 0; t < kThreads; ++t) {
    for (std::uint64_t round : {0, 1, 3, 4, 6, 7}) {
      std::string name = "t" + std::to_string(t) + "." + std::to_string(round);
      StateId id = store->find(name, "exp_avg").value();
      EXPECT_TRUE(holds(*store, id, kBytes, t * 100 + round));
    }
  }
}

}  // namespace
}  // namespace zinf
