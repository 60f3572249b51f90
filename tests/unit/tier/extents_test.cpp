#include "src/tier/extents.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>

#include "src/base/align.h"

namespace zinf::tier {
namespace {

std::uint64_t total(const std::vector<Piece>& pieces) {
  std::uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

Capacity room(std::vector<std::uint64_t> volume_bytes,
              std::vector<Piece> metadata = {}) {
  return {.volume_bytes = std::move(volume_bytes),
          .metadata = std::move(metadata)};
}

TEST(FreeList, TakesTheSmallestRangeThatFits) {
  FreeList list(0, 100 * kUnit);
  ASSERT_TRUE(list.take_at(10 * kUnit, 20 * kUnit));
  ASSERT_TRUE(list.take_at(35 * kUnit, 60 * kUnit));
  // Free: [0, 10), [30, 35), [95, 100).
  auto taken = list.take(4 * kUnit);
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0].first, 30 * kUnit);
  taken = list.take(14 * kUnit);  // more than any: the largest first
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].first, 0u);
  EXPECT_EQ(list.free_bytes(), 2 * kUnit);
}

TEST(FreeList, GivesCoalesce) {
  FreeList list(0, 30 * kUnit);
  auto a = list.take(10 * kUnit);
  auto b = list.take(10 * kUnit);
  auto c = list.take(10 * kUnit);
  EXPECT_EQ(list.num_ranges(), 0u);
  list.give(a[0].first, a[0].second);
  list.give(c[0].first, c[0].second);
  EXPECT_EQ(list.num_ranges(), 2u);
  list.give(b[0].first, b[0].second);
  EXPECT_EQ(list.num_ranges(), 1u);
  EXPECT_EQ(list.free_bytes(), 30 * kUnit);
  EXPECT_FALSE(list.take_at(25 * kUnit, 10 * kUnit));  // beyond the end
}

TEST(Allocator, SucceedsWheneverTheBytesAreFree) {
  Allocator allocator(kMiB, room({kDataBegin + 10 * kMiB}));
  std::vector<std::vector<Piece>> held;
  while (allocator.free_bytes() > 0)
    held.push_back(allocator.take(kUnit).value());
  for (std::size_t i = 0; i < held.size(); i += 2) allocator.give(held[i]);
  // Every second page is free; all of them can still be had at once.
  std::uint64_t free = allocator.free_bytes();
  Result<std::vector<Piece>> all = allocator.take(free);
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(total(*all), free);
  EXPECT_EQ(allocator.take(1).status().code(), Code::kNoSpace);
}

TEST(Allocator, AFullVolumeLeavesItsShareToTheOthers) {
  Allocator allocator(kMiB,
                      room({kDataBegin + 2 * kMiB, kDataBegin + 20 * kMiB}));
  std::vector<double> weights = {10, 1};
  allocator.set_weights(weights);
  Result<std::vector<Piece>> pieces = allocator.take(21 * kMiB);
  ASSERT_TRUE(pieces.ok()) << pieces.status().text();
  EXPECT_EQ(total(*pieces), 21 * kMiB);
}

TEST(Allocator, MetadataHasItsOwnRoom) {
  Allocator allocator(kMiB,
                      room({kDataBegin + 11 * kMiB}, {{0, kDataBegin, kMiB}}));
  ASSERT_TRUE(allocator.take(10 * kMiB).ok());
  EXPECT_EQ(allocator.free_bytes(), 0u);
  Result<std::vector<Piece>> table = allocator.take_metadata(5000);
  ASSERT_TRUE(table.ok());
  EXPECT_EQ((*table)[0].offset, kDataBegin);
  EXPECT_FALSE(allocator.take_at(*table).ok());  // taken twice
  allocator.give(*table);
  EXPECT_TRUE(allocator.take_at(*table).ok());
}

TEST(Allocator, GrowsWhileItIsUsed) {
  Capacity now =
      room({kDataBegin + 2 * kMiB, kDataBegin + kMiB}, {{0, kDataBegin, kMiB}});
  Allocator allocator(kMiB, now);
  EXPECT_EQ(allocator.capacity_bytes(), 2 * kMiB);
  std::vector<Piece> before = allocator.take(2 * kMiB).value();
  ASSERT_TRUE(allocator.take_metadata(kMiB).ok());
  EXPECT_EQ(allocator.take_metadata(1).status().code(), Code::kNoSpace);

  Capacity next = now;
  next.volume_bytes = {kDataBegin + 5 * kMiB, kDataBegin + 2 * kMiB};
  next.metadata.push_back({0, kDataBegin + 2 * kMiB, kMiB});
  allocator.grow(next);
  allocator.grow(next);  // nothing more
  EXPECT_EQ(allocator.capacity_bytes(), 5 * kMiB);
  EXPECT_EQ(allocator.free_bytes(), 3 * kMiB);
  std::vector<Piece> table = allocator.take_metadata(kMiB).value();
  EXPECT_EQ(table, (std::vector<Piece>{next.metadata[1]}));
  EXPECT_EQ(total(allocator.take(3 * kMiB).value()), 3 * kMiB);
  allocator.give(before);
  allocator.give(table);
  EXPECT_EQ(allocator.free_bytes(), 2 * kMiB);
  EXPECT_EQ(allocator.take_metadata(kMiB).value(), table);
}

// A long run with copy on write on a store of exactly three copies: each step
// most states, of mixed sizes and in any order, go to free space; the version
// before the last is freed; now and then one is kept for a while.
TEST(Allocator, TenThousandStepsLoseNothingToFragmentation) {
  using State = std::shared_ptr<std::vector<Piece>>;
  std::mt19937_64 random(7);
  std::vector<std::uint64_t> sizes;
  std::uint64_t all = 0;
  for (int i = 0; i < 40; ++i) {
    std::uint64_t bytes = std::uint64_t{1} << (random() % 14);
    bytes = (bytes + random() % bytes) * kUnit;  // 4 KiB to 64 MiB
    sizes.push_back(bytes);
    all += bytes;
  }
  std::uint64_t volume = kDataBegin + 3 * all;
  Allocator allocator(kMiB, room({volume}));
  auto take = [&](std::uint64_t bytes) -> State {
    Result<std::vector<Piece>> pieces = allocator.take(bytes);
    if (!pieces.ok()) return nullptr;
    EXPECT_EQ(total(*pieces), bytes);
    for (const Piece& piece : *pieces) EXPECT_LE(piece.end(), volume);
    return {new std::vector<Piece>(std::move(pieces).value()),
            [&](std::vector<Piece>* held) {
              allocator.give(*held);
              delete held;
            }};
  };
  std::vector<State> now(sizes.size());
  std::vector<State> last;
  std::vector<State> kept;
  std::vector<std::size_t> order(sizes.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  double pieces = 0;
  double states = 0;
  double bytes = 0;
  constexpr int kSteps = 10'000;
  for (int step = 0; step < kSteps; ++step) {
    last = now;
    if (step % 37 == 0) kept = last;
    std::shuffle(order.begin(), order.end(), random);
    for (std::size_t i : order) {
      if (now[i] != nullptr && random() % 10 == 0) continue;  // unchanged
      now[i] = take(sizes[i]);
      ASSERT_NE(now[i], nullptr) << "step " << step;  // no byte is lost
      if (step < kSteps / 2) continue;
      pieces += static_cast<double>(now[i]->size());
      bytes += static_cast<double>(sizes[i]);
      states += 1;
    }
  }
  // All of the space is still there to be had: 0 % lost.
  now.clear();
  last.clear();
  kept.clear();
  EXPECT_EQ(allocator.free_bytes(), 3 * all);
  EXPECT_EQ(allocator.num_free_extents(), 1u);
  std::printf("average piece %.1f MiB, %.2f pieces per state\n",
              bytes / pieces / kMiB, pieces / states);
  EXPECT_GT(bytes / pieces, kMiB);
  EXPECT_LT(pieces / states, 3);
}

}  // namespace
}  // namespace zinf::tier
