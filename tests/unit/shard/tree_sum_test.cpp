#include "src/shard/tree_sum.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace zinf::shard {
namespace {

void join(std::string& sum, const std::string& term) {
  sum = "(" + sum + "+" + term + ")";
}

std::string total_of(const std::vector<std::uint64_t>& numbers) {
  TreeSum<std::string> sum;
  for (std::uint64_t number : numbers) {
    sum.add(number, std::to_string(number), join);
  }
  return sum.total(join);
}

// What the tree is defined as.
std::optional<std::string> defined(const std::vector<std::uint64_t>& numbers,
                                   std::uint64_t begin, std::uint64_t end) {
  if (end - begin == 1) {
    const bool there = std::ranges::count(numbers, begin) > 0;
    return there ? std::optional(std::to_string(begin)) : std::nullopt;
  }
  const std::uint64_t middle = begin + (end - begin) / 2;
  auto left = defined(numbers, begin, middle);
  auto right = defined(numbers, middle, end);
  if (left && right) join(*left, *right);
  return left ? left : right;
}

TEST(TreeSum, AddsNeighboursFirst) {
  EXPECT_EQ(total_of({0, 1, 2, 3}), "((0+1)+(2+3))");
  EXPECT_EQ(total_of({4, 5, 6}), "((4+5)+6)");
  EXPECT_EQ(total_of({1, 2}), "(1+2)");
  EXPECT_EQ(total_of({7}), "7");
}

TEST(TreeSum, IsEmptyAfterItsTotal) {
  TreeSum<int> sum;
  auto add = [](int& a, int b) { a += b; };
  EXPECT_TRUE(sum.empty());
  sum.add(0, 1, add);
  sum.add(1, 2, add);
  EXPECT_FALSE(sum.empty());
  EXPECT_EQ(sum.total(add), 3);
  EXPECT_TRUE(sum.empty());
}

RC_GTEST_PROP(TreeSum, HasTheOrderOfTheTreeWhateverIsMissing, ()) {
  constexpr std::uint64_t kLeaves = 64;
  const auto there = *rc::gen::container<std::vector<bool>>(
      kLeaves, rc::gen::arbitrary<bool>());
  std::vector<std::uint64_t> numbers;
  for (std::uint64_t i = 0; i < kLeaves; ++i) {
    if (there[i]) numbers.push_back(i);
  }
  RC_PRE(!numbers.empty());
  RC_ASSERT(total_of(numbers) == defined(numbers, 0, kLeaves));
}

}  // namespace
}  // namespace zinf::shard
