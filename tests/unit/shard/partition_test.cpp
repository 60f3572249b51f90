#include "zinf/partition.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace zinf {
namespace {

TEST(Partition, SplitsIntoEqualSlices) {
  Partition partition(1024, 4);
  EXPECT_EQ(partition.slice_elements(), 256u);
  EXPECT_EQ(partition.slice(0), (Slice{0, 256}));
  EXPECT_EQ(partition.slice(3), (Slice{768, 1024}));
}

TEST(Partition, TheLastSlicesMayBeShortOrEmpty) {
  Partition partition(100, 4);
  EXPECT_EQ(partition.slice(0), (Slice{0, 64}));
  EXPECT_EQ(partition.slice(1), (Slice{64, 100}));
  EXPECT_EQ(partition.slice(2).size(), 0u);
  EXPECT_EQ(partition.slice(3).size(), 0u);
}

TEST(Partition, OneRankHasEverything) {
  EXPECT_EQ(Partition(77, 1).slice(0), (Slice{0, 77}));
  EXPECT_EQ(Partition(0, 1).slice(0), (Slice{0, 0}));
}

RC_GTEST_PROP(Partition, CoversEveryElementOnceInOrder, ()) {
  const auto elements = *rc::gen::inRange<std::uint64_t>(0, 100'000);
  const int ranks = *rc::gen::inRange(1, 70);
  const Partition partition(elements, ranks);
  std::uint64_t at = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const Slice slice = partition.slice(rank);
    RC_ASSERT(slice.begin == at);
    RC_ASSERT(slice.end >= slice.begin);
    RC_ASSERT(slice.size() <= partition.slice_elements());
    RC_ASSERT(slice.size() == 0 || slice.begin % Partition::kMultiple == 0);
    if (slice.size() > 0) {
      RC_ASSERT(partition.rank_of(slice.begin) == rank);
      RC_ASSERT(partition.rank_of(slice.end - 1) == rank);
    }
    at = slice.end;
  }
  RC_ASSERT(at == elements);
}

RC_GTEST_PROP(Partition, PadsByLessThanAMultiplePerRank, ()) {
  const auto elements = *rc::gen::inRange<std::uint64_t>(0, 1ULL << 40);
  const int ranks = *rc::gen::inRange(1, 1000);
  const Partition partition(elements, ranks);
  const std::uint64_t all =
      partition.slice_elements() * static_cast<std::uint64_t>(ranks);
  RC_ASSERT(all >= elements);
  RC_ASSERT(all - elements <=
            static_cast<std::uint64_t>(ranks) * Partition::kMultiple);
}

}  // namespace
}  // namespace zinf
