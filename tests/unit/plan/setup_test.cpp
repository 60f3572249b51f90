#include "zinf/setup.h"

#include <gtest/gtest.h>

#include "tests/support/ok.h"

namespace zinf::plan {
namespace {

Setup small() {
  Setup setup;
  setup.shape = {.layers = 10, .hidden = 1024, .heads = 8};
  setup.cluster = ok(built_in_cluster("dgx2-v100"));
  return setup;
}

double bytes_of(const Setup& setup, const std::string& what) {
  double sum = 0;
  for (const Taken& one : footprint(setup).taken)
    if (one.what == what) sum += one.bytes;
  return sum;
}

TEST(Setup, ThePaperKeepsTwentyBytesPerParameter) {
  auto setup = small();
  const double params = total_params(setup.shape);
  setup.stage = 0;
  EXPECT_DOUBLE_EQ(bytes_of(setup, "weights") + bytes_of(setup, "gradients") +
                       bytes_of(setup, "fp32 gradients") +
                       bytes_of(setup, "optimizer states"),
                   20 * params);
  setup.stage = 2;
  EXPECT_DOUBLE_EQ(bytes_of(setup, "weights") + bytes_of(setup, "gradients") +
                       bytes_of(setup, "fp32 gradients") +
                       bytes_of(setup, "optimizer states"),
                   (2 + 18.0 / 16) * params);
  setup.stage = 3;
  EXPECT_DOUBLE_EQ(bytes_of(setup, "weights"), 2 * params / 16);
}

TEST(Setup, GradientsThatAreConsumedAreNotKept) {
  auto setup = small();
  setup.mechanisms = zinf_mechanisms();
  EXPECT_EQ(bytes_of(setup, "gradients"), 0);
  EXPECT_EQ(bytes_of(setup, "fp32 gradients"), 0);
}

TEST(Setup, MicroBatchesAndTilesTakeLessWorkingMemory) {
  auto setup = small();
  setup.batch = 8;
  const double whole = bytes_of(setup, "activations at work");
  const double largest =
      bytes_of(setup, "largest operator's weight and gradient");
  setup.micro_batches = 4;
  setup.mechanisms.tiles = 16;
  EXPECT_DOUBLE_EQ(bytes_of(setup, "activations at work"), whole / 4);
  EXPECT_DOUBLE_EQ(bytes_of(setup, "largest operator's weight and gradient"),
                   largest / 16);
}

TEST(Setup, OnAHostNothingIsOnADevice) {
  auto setup = small();
  setup.cluster.on_host = true;
  const Footprint taken = footprint(setup);
  EXPECT_EQ(taken.on(Tier::kDevice), 0);
  EXPECT_GT(taken.on(Tier::kHost), 0);
}

TEST(Setup, GroupsOfANodeHoldMoreEach) {
  auto setup = small();
  setup.cluster.nodes = 4;
  const double all = bytes_of(setup, "optimizer states");
  setup.mechanisms.node_groups = true;
  EXPECT_DOUBLE_EQ(bytes_of(setup, "optimizer states"), 4 * all);
}

TEST(Setup, PrecisionsAreKnownByName) {
  EXPECT_EQ(ok(zinf_precision("bf16")).states, 12);
  EXPECT_EQ(ok(zinf_precision("bf16-split")).states, 10);
  EXPECT_EQ(ok(zinf_precision("fp32")).weight, 4);
  EXPECT_NE(zinf_precision("bf17").status().text().find("did you mean bf16?"),
            std::string::npos);
}

TEST(Setup, TellsEveryProblem) {
  auto setup = small();
  setup.batch = 0;
  setup.micro_batches = 0;
  setup.model_parallel = 5;
  const std::string text = check(setup).text();
  EXPECT_NE(text.find("the batch must be above 0"), std::string::npos);
  EXPECT_NE(text.find("micro-batches must be from 1"), std::string::npos);
  EXPECT_NE(text.find("does not divide a node's 16"), std::string::npos);
}

}  // namespace
}  // namespace zinf::plan
