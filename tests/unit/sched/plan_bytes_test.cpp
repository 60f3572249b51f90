// How many bytes plans move, against the least.
#include <gtest/gtest.h>

#include <deque>

#include "tests/unit/sched/traces.h"
#include "zinf/plan.h"

namespace zinf {
namespace {

std::uint64_t moved(const Case& given, std::uint64_t budget_bytes) {
  const PlanInput input = given.input(budget_bytes);
  const Plan plan = make_plan(given.trace, input).value();
  const Forecast step = simulate(given.trace, plan, input).value();
  EXPECT_LE(step.high_bytes, budget_bytes);
  return step.bytes_read + step.bytes_written;
}

// Over small random traces.
struct Compared {
  std::uint32_t cases = 0;
  std::uint32_t least = 0;  // of these, with the least bytes of all plans
  double bytes = 0;
  double least_bytes = 0;
};

Compared compare(Sizes sizes, Kinds kinds) {
  Compared sum;
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const Case given =
        random_case(4 + seed % 6, 2 + seed % 5, sizes, kinds, seed);
    const std::uint64_t budget = given.budget(seed % 8);
    const std::uint64_t bytes = moved(given, budget);
    const std::uint64_t least = AllPlans(given, budget).least_bytes();
    EXPECT_GE(bytes, least) << "seed " << seed;
    ++sum.cases;
    sum.least += bytes == least;
    sum.bytes += double(bytes);
    sum.least_bytes += double(least);
  }
  return sum;
}

TEST(PlanBytes, UniformReadsAreTheLeastOfAllPlans) {
  const Compared sum = compare(Sizes::kUniform, Kinds::kReads);
  EXPECT_EQ(sum.least, sum.cases);
}

TEST(PlanBytes, UniformWithWritesIsNearlyTheLeast) {
  const Compared sum = compare(Sizes::kUniform, Kinds::kAll);
  EXPECT_GE(sum.least, 0.95 * sum.cases);
  EXPECT_LE(sum.bytes, 1.03 * sum.least_bytes);
}

TEST(PlanBytes, DifferentSizesAreNearTheLeast) {
  const Compared reads = compare(Sizes::kDifferent, Kinds::kReads);
  EXPECT_LE(reads.bytes, 1.05 * reads.least_bytes);
  const Compared all = compare(Sizes::kDifferent, Kinds::kAll);
  EXPECT_LE(all.bytes, 1.05 * all.least_bytes);
}

TEST(PlanBytes, OfASmallTrainingStepAreTheLeast) {
  const Case given = training_step(2, 3);
  for (std::uint64_t budget = 12; budget <= 24; budget += 6)
    EXPECT_EQ(moved(given, budget), AllPlans(given, budget).least_bytes())
        << budget;
}

TEST(PlanBytes, LongTracesAreNearBelady) {
  for (const Sizes sizes : {Sizes::kUniform, Sizes::kDifferent}) {
    for (std::uint32_t part = 1; part < 8; ++part) {
      const Case given = random_case(1200, 300, sizes, Kinds::kReads, part);
      const std::uint64_t budget = given.budget(part);
      const double least = belady_bytes(given, budget);
      const auto bytes = double(moved(given, budget));
      EXPECT_LE(bytes, 1.05 * least) << part << " of 8";
    }
  }
}

// Bytes read per step by dropping what was used longest ago.
std::uint64_t lru_bytes(const Case& given, std::uint64_t budget_bytes) {
  std::deque<std::uint32_t> in_memory;
  std::uint64_t memory = 0;
  std::uint64_t read = 0;
  for (int round = 0; round < 2; ++round) {
    read = 0;
    for (const StateUse& use : given.trace.uses()) {
      const auto found = std::ranges::find(in_memory, use.state);
      if (found != in_memory.end()) {
        in_memory.erase(found);
      } else {
        read += given.states[use.state].bytes;
        memory += given.states[use.state].bytes;
      }
      in_memory.push_back(use.state);
      for (; memory > budget_bytes; in_memory.pop_front())
        memory -= given.states[in_memory.front()].bytes;
    }
  }
  return read;
}

TEST(PlanBytes, MemoryForAPartOfAScanSavesThatPartAndLruSavesNothing) {
  const Case given = scan(100, UseKind::kRead, 10);
  for (std::uint64_t part = 10; part < 100; part += 10) {
    const std::uint64_t budget = 10 * part;
    EXPECT_EQ(lru_bytes(given, budget), 1000u);
    // One state's memory is for whatever is in use.
    EXPECT_EQ(moved(given, budget), 1000u - 10 * (part - 1));
  }
}

TEST(PlanBytes, AdamStatesCostTwiceWhatTheirReadDoes) {
  const Case given = scan(100, UseKind::kChange, 10);
  EXPECT_EQ(moved(given, 510), 2 * 500u);
}

TEST(PlanBytes, MoreMemoryNeverMovesMore) {
  const Case given = training_step(40, 5);
  std::uint64_t before = ~std::uint64_t{0};
  for (std::uint32_t part = 0; part <= 8; ++part) {
    const std::uint64_t bytes = moved(given, given.budget(part));
    EXPECT_LE(bytes, before);
    before = bytes;
  }
  EXPECT_EQ(before, 0u);
}

}  // namespace
}  // namespace zinf
