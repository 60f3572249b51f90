#include "zinf/model_shape.h"

#include <gtest/gtest.h>

namespace zinf::plan {
namespace {

ModelShape one_trillion() {
  return {.layers = 128, .hidden = 25600, .heads = 256};
}

TEST(ModelShape, CountsTwelveHiddenSquaredPerBlock) {
  EXPECT_DOUBLE_EQ(total_params(one_trillion()), 12.0 * 128 * 25600 * 25600);
  ModelShape small{.layers = 2, .hidden = 8, .vocab = 100};
  EXPECT_DOUBLE_EQ(total_params(small), 2 * 12 * 64 + 800);
}

TEST(ModelShape, ItsOwnNumbersCountWhereItHasThem) {
  ModelShape shape = one_trillion();
  shape.block_params = 7;
  shape.other_params = 3;
  EXPECT_DOUBLE_EQ(total_params(shape), 128 * 7 + 3);
}

TEST(ModelShape, TheEmbeddingMayBeTheLargestOperator) {
  EXPECT_DOUBLE_EQ(largest_params(one_trillion()), 4.0 * 25600 * 25600);
  ModelShape small{.layers = 2, .hidden = 8, .vocab = 100};
  EXPECT_DOUBLE_EQ(largest_params(small), 800);
}

TEST(ModelShape, AStepTakesEightOperationsPerParameterAndToken) {
  ModelShape shape = one_trillion();
  shape.heads = 0;
  const double tokens = 5000;
  EXPECT_DOUBLE_EQ(4 * forward_flops(shape, tokens) * 128,
                   8 * total_params(shape) * tokens);
}

TEST(ModelShape, AttentionAddsASixthOfTheSequenceOverTheHiddenSize) {
  ModelShape without = one_trillion();
  without.heads = 0;
  const double share =
      forward_flops(one_trillion(), 1) / forward_flops(without, 1) - 1;
  EXPECT_NEAR(share, 1024.0 / (6 * 25600), 1e-12);
}

TEST(ModelShape, OfExpertsOnlyTheActiveOnesCompute) {
  ModelShape shape{.layers = 1, .hidden = 8};
  shape.block_params = 1000;
  shape.active_block_params = 250;
  EXPECT_DOUBLE_EQ(forward_flops(shape, 1), 500);
}

TEST(ModelShape, TellsEveryProblem) {
  const Status status = check(ModelShape{.seq = 0});
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_EQ(status.text(),
            "a model with no layers, a hidden size of 0, a sequence length of "
            "0");
}

TEST(ModelShape, RefusesHeadsThatDoNotDivide) {
  const Status status =
      check(ModelShape{.layers = 1, .hidden = 10, .heads = 3});
  EXPECT_NE(status.text().find("3 heads that do not divide"),
            std::string::npos);
}

TEST(ModelShape, RefusesMoreThanCanBeCounted) {
  const std::uint64_t huge = ~std::uint64_t{0};
  const Status status =
      check(ModelShape{.layers = huge, .hidden = huge, .seq = huge});
  EXPECT_NE(status.text().find("more than 10^18 parameters"),
            std::string::npos);
}

}  // namespace
}  // namespace zinf::plan
