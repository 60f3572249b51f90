#include "zinf/step_forecast.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <vector>

#include "tests/support/ok.h"

namespace zinf::plan {
namespace {

const std::vector<Tier> kAnyTier(kTiers.begin(), kTiers.end());
constexpr Placement kOnNvme = {
    .weights = Tier::kNvme, .grads = Tier::kNvme, .states = Tier::kNvme};

Setup paper_100b() {
  Setup setup;
  setup.shape = {.layers = 100, .hidden = 8192};
  setup.cluster = ok(built_in_cluster("dgx2-v100"));
  setup.batch = 8;
  return setup;
}

// One process with nothing but its own memory and disk.
Setup single() {
  auto setup = paper_100b();
  setup.cluster.devices_per_node = 1;
  setup.cluster.devices_per_uplink = 1;
  setup.mechanisms = zinf_mechanisms();
  setup.precision = ok(zinf_precision("bf16"));
  setup.placement = kOnNvme;
  setup.placement.grads = Tier::kHost;
  return setup;
}

double nvme_bytes_per_param(const Setup& setup) {
  const StepForecast step = ok(forecast_step(setup));
  return (step.lane(Lane::kNvmeRead).bytes +
          step.lane(Lane::kNvmeWrite).bytes) *
         double(setup.cluster.devices()) / total_params(setup.shape);
}

TEST(StepForecast, WithNothingToMoveTakesTheComputeAndTheUpdate) {
  auto setup = paper_100b();
  setup.cluster.devices_per_node = 1;
  const StepForecast step = ok(forecast_step(setup));
  const double params = total_params(setup.shape);
  const double compute = 8 * params * 8 * 1024 / 50e12;
  EXPECT_NEAR(step.compute_seconds, compute, 1e-9 * compute);
  EXPECT_NEAR(step.seconds, compute + 28 * params / 600e9, 1e-6 * compute);
}

TEST(StepForecast, ThePaperMovesItsBytes) {
  auto setup = paper_100b();
  setup.placement = kOnNvme;
  const StepForecast step = ok(forecast_step(setup));
  const double per_rank = total_params(setup.shape) / 16;
  // Weights for two passes, states and gradients for the update; gradients,
  // states and weights back. What the next position uses is not moved.
  EXPECT_NEAR(step.lane(Lane::kNvmeRead).bytes / per_rank, 2 + 2 + 12 + 4, 0.1);
  EXPECT_NEAR(step.lane(Lane::kNvmeWrite).bytes / per_rank, 4 + 12 + 2, 0.1);
  EXPECT_NEAR(step.lane(Lane::kDeviceToHost).bytes / per_rank, 4, 1e-6);
}

TEST(StepForecast, TheOptimizerWaitsForTheSlowerDirectionOfNvme) {
  auto setup = paper_100b();
  setup.placement = {.grads = Tier::kHost, .states = Tier::kNvme};
  const StepForecast step = ok(forecast_step(setup));
  const double params = total_params(setup.shape);
  const double copies = 4 * params / 48e9;
  const double optimizer = 12 * params / 25.6e9;
  EXPECT_NEAR(step.seconds, step.compute_seconds + copies + optimizer,
              0.02 * step.seconds);
}

TEST(StepForecast, ZinfMovesThirtyBytesWithNothingKept) {
  auto setup = single();
  // Room for moves and little else.
  setup.cluster.host_bytes = footprint(setup).on(Tier::kHost);
  EXPECT_NEAR(nvme_bytes_per_param(setup), 30, 1.5);
  setup.precision = ok(zinf_precision("bf16-split"));
  setup.cluster.host_bytes = footprint(setup).on(Tier::kHost);
  EXPECT_NEAR(nvme_bytes_per_param(setup), 26, 1.5);
  setup.placement.weights = Tier::kHost;
  setup.cluster.host_bytes = footprint(setup).on(Tier::kHost);
  EXPECT_NEAR(nvme_bytes_per_param(setup), 20, 1.0);
}

TEST(StepForecast, WhatNeverMovesIsAsQuickAsOnTheHost) {
  auto setup = single();
  setup.cluster.host_bytes = 20 * total_params(setup.shape);
  const double on_nvme = ok(forecast_step(setup)).seconds;
  setup.placement = {
      .weights = Tier::kHost, .grads = Tier::kHost, .states = Tier::kHost};
  EXPECT_NEAR(ok(forecast_step(setup)).seconds, on_nvme, 1e-6 * on_nvme);
}

TEST(StepForecast, WhatFitsInHostMemoryIsNotMoved) {
  auto setup = single();
  setup.cluster.host_bytes = 20 * total_params(setup.shape);
  EXPECT_EQ(nvme_bytes_per_param(setup), 0);
  double before = 31;
  for (const double per_param : {2.0, 4.0, 8.0, 12.0}) {
    setup.cluster.host_bytes = per_param * total_params(setup.shape);
    const double moved = nvme_bytes_per_param(setup);
    EXPECT_LT(moved, before);
    before = moved;
  }
}

TEST(StepForecast, ADriveHasLessForBothWaysAtOnce) {
  auto setup = single();
  setup.batch = 0.1;
  setup.cluster.host_bytes = footprint(setup).on(Tier::kHost);
  const StepForecast apart = ok(forecast_step(setup));
  setup.cluster.nvme_rate =
      setup.cluster.nvme_read_rate + setup.cluster.nvme_write_rate;
  EXPECT_NEAR(ok(forecast_step(setup)).seconds, apart.seconds,
              0.05 * apart.seconds);
  setup.cluster.nvme_rate /= 3;
  const StepForecast together = ok(forecast_step(setup));
  const double moved = together.lane(Lane::kNvmeRead).bytes +
                       together.lane(Lane::kNvmeWrite).bytes;
  EXPECT_NEAR(together.seconds, moved / setup.cluster.nvme_rate,
              0.05 * together.seconds);
  EXPECT_GT(together.seconds, 1.3 * apart.seconds);
}

// A process on a machine without a device, whose cores do everything.
Setup on_host() {
  auto setup = single();
  setup.cluster.on_host = true;
  setup.placement = {.states = Tier::kNvme};
  setup.cluster.host_bytes = footprint(setup).on(Tier::kHost);
  return setup;
}

TEST(StepForecast, OnTheHostUpdatesTakeTimeFromTheCompute) {
  const auto setup = on_host();
  const StepForecast step = ok(forecast_step(setup));
  EXPECT_NEAR(step.seconds,
              step.compute_seconds + step.lane(Lane::kUpdate).busy_seconds,
              0.05 * step.seconds);
}

TEST(StepForecast, OnTheHostMovesTakeTimeFromTheCompute) {
  auto setup = on_host();
  const StepForecast without = ok(forecast_step(setup));
  const double moved = without.lane(Lane::kNvmeRead).bytes +
                       without.lane(Lane::kNvmeWrite).bytes;
  setup.cluster.nvme_drag = 0.1 * without.seconds / moved;
  EXPECT_NEAR(ok(forecast_step(setup)).seconds, 1.1 * without.seconds,
              0.02 * without.seconds);
}

TEST(StepForecast, MicroBatchesInTurnReadWeightsAgain) {
  auto setup = paper_100b();
  setup.placement = {.weights = Tier::kHost};
  setup.micro_batches = 4;
  const double per_rank = total_params(setup.shape) / 16;
  const StepForecast each = ok(forecast_step(setup));
  EXPECT_NEAR(each.lane(Lane::kHostToDevice).bytes / per_rank, 4 * 3 * 2, 0.01);
  setup.mechanisms.vertical = true;
  const StepForecast once = ok(forecast_step(setup));
  EXPECT_NEAR(once.lane(Lane::kHostToDevice).bytes / per_rank, 3 * 2, 0.01);
}

TEST(StepForecast, OverlapHidesWhatIsShorterThanTheCompute) {
  auto setup = paper_100b();
  setup.cluster.nodes = 4;
  const StepForecast with = ok(forecast_step(setup));
  setup.mechanisms.overlap = false;
  const StepForecast without = ok(forecast_step(setup));
  EXPECT_NEAR(with.seconds, with.compute_seconds, 0.02 * with.seconds);
  EXPECT_NEAR(without.seconds - with.seconds,
              without.lane(Lane::kNetwork).busy_seconds,
              0.02 * without.seconds);
}

TEST(StepForecast, UpdatesInsideBackwardDoNotKeepGathersFromBeingAhead) {
  auto setup = paper_100b();
  setup.cluster.nodes = 4;
  setup.mechanisms = zinf_mechanisms();
  const StepForecast step = ok(forecast_step(setup));
  EXPECT_GT(step.lane(Lane::kNetwork).busy_seconds, 0.04 * step.seconds);
  EXPECT_NEAR(step.seconds, step.compute_seconds, 0.02 * step.seconds);
}

TEST(StepForecast, AnOwnerMovesAloneWhatSixteenMoveAtOnce) {
  auto setup = paper_100b();
  setup.placement = {.grads = Tier::kHost, .states = Tier::kHost};
  const double all =
      ok(forecast_step(setup)).lane(Lane::kDeviceToHost).busy_seconds;
  setup.mechanisms.owners = true;
  const double owner =
      ok(forecast_step(setup)).lane(Lane::kDeviceToHost).busy_seconds;
  EXPECT_NEAR(owner / all, 48.0 / 12, 1e-6);
}

TEST(StepForecast, TheSlowestLaneIsTheBound) {
  auto setup = paper_100b();
  EXPECT_EQ(ok(bounds(setup))[0].lane, Lane::kCompute);
  setup.placement = kOnNvme;
  setup.batch = 0.1;
  setup.cluster.nvme_write_rate = 1e9;
  EXPECT_EQ(ok(bounds(setup))[0].lane, Lane::kNvmeWrite);
}

TEST(StepForecast, TensOfThousandsOfDevicesAreSimulated) {
  auto setup = paper_100b();
  setup.cluster.nodes = 4096;
  setup.placement = kOnNvme;
  const StepForecast step = ok(forecast_step(setup));
  EXPECT_GT(step.efficiency(), 0.1);
  EXPECT_LE(step.efficiency(), 1);
}

TEST(StepForecast, TooLittleHostMemoryForOneMomentIsTold) {
  auto setup = single();
  setup.cluster.host_bytes = 1e6;
  EXPECT_EQ(forecast_step(setup).status().code(), Code::kOverBudget);
}

double Cluster::* const kRates[] = {&Cluster::peak_flops,
                                    &Cluster::device_memory_rate,
                                    &Cluster::host_memory_rate,
                                    &Cluster::link_rate,
                                    &Cluster::nvme_read_rate,
                                    &Cluster::nvme_write_rate,
                                    &Cluster::device_network_rate,
                                    &Cluster::node_network_rate,
                                    &Cluster::nvme_rate};

Setup any_setup() {
  auto setup = paper_100b();
  const auto flip = [] { return *rc::gen::arbitrary<bool>(); };
  setup.shape.layers = *rc::gen::inRange<std::uint64_t>(1, 12);
  setup.shape.hidden = 512 * *rc::gen::inRange<std::uint64_t>(1, 20);
  setup.cluster.nodes = *rc::gen::inRange<std::uint64_t>(1, 5);
  setup.micro_batches = *rc::gen::inRange<std::uint64_t>(1, 4);
  setup.model_parallel = *rc::gen::elementOf(std::vector<std::uint64_t>{1, 4});
  setup.stage = *rc::gen::inRange(0, 4);
  setup.placement = {.weights = *rc::gen::elementOf(kAnyTier),
                     .grads = *rc::gen::elementOf(kAnyTier),
                     .states = *rc::gen::elementOf(kAnyTier),
                     .activations = *rc::gen::elementOf(kAnyTier)};
  setup.mechanisms = {.overlap = flip(),
                      .overlap_grads = flip(),
                      .overlap_activations = flip(),
                      .update_in_backward = flip(),
                      .keep = flip(),
                      .vertical = flip(),
                      .node_groups = flip(),
                      .owners = flip()};
  setup.cluster.nvme_rate =
      setup.cluster.nvme_read_rate + setup.cluster.nvme_write_rate;
  setup.cluster.on_host = flip();
  setup.cluster.nvme_drag = flip() ? 1e-10 : 0;
  for (double Cluster::* rate : kRates)
    setup.cluster.*rate *= double(*rc::gen::inRange(1, 100)) / 20;
  return setup;
}

RC_GTEST_PROP(StepForecast, NeverFallsWhenARateFalls, ()) {
  auto setup = any_setup();
  const Result<StepForecast> before = forecast_step(setup);
  RC_PRE(before.ok());
  RC_ASSERT(before.value().seconds >=
            (1 - 1e-9) * before.value().compute_seconds);
  const int which = *rc::gen::inRange(0, 9);
  setup.cluster.*kRates[which] *= double(*rc::gen::inRange(1, 100)) / 100;
  const Result<StepForecast> after = forecast_step(setup);
  RC_ASSERT(after.ok());
  RC_ASSERT(after.value().seconds >= (1 - 1e-9) * before.value().seconds);
}

}  // namespace
}  // namespace zinf::plan
