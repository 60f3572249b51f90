#include "zinf/advice.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "src/plan/numbers.h"
#include "tests/support/ok.h"
#include "zinf/bytes.h"
#include "zinf/what_if.h"

namespace zinf::plan {
namespace {

Request seven_billion() {
  Request request;
  request.shape = {.name = "7B",
                   .layers = 32,
                   .hidden = 4096,
                   .heads = 32,
                   .vocab = 32000,
                   .seq = 2048};
  request.cluster = ok(built_in_cluster("rtx4090-workstation"));
  request.batch = 4;
  return request;
}

TEST(Advice, SevenBillionTrainOnAWorkstation) {
  const Advice advice = ok(advise(seven_billion()));
  ASSERT_TRUE(advice.fits());
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    EXPECT_LE(advice.footprint.on(tier), capacity(advice.setup.cluster, tier));
  }
  EXPECT_NE(advice.setup.placement.states, Tier::kDevice);
  EXPECT_GT(advice.tokens_per_second, 0);
  EXPECT_LE(advice.step.efficiency(), 1);
  EXPECT_EQ(advice.bounds.size(), kLanes - 1);
}

// Of one process.
void set_memory(Request& request, Tier tier, double bytes) {
  Cluster& cluster = request.cluster;
  const double ranks = double(cluster.devices_per_node);
  switch (tier) {
    case Tier::kDevice:
      cluster.device_bytes = bytes;
      return;
    case Tier::kHost:
      cluster.host_bytes = ranks * bytes;
      return;
    case Tier::kNvme:
      cluster.nvme_bytes = ranks * bytes;
      return;
  }
}

std::optional<double> least(const Advice& advice, Tier tier) {
  return advice.least[static_cast<std::size_t>(tier)];
}

// As a person would who reads it off the table.
double printed(double bytes) {
  return double(ok(parse_bytes(
      format_bytes_up(static_cast<std::uint64_t>(std::ceil(bytes))))));
}

// A small model on a workstation that it may or may not fit on.
Request any_request() {
  Request request = seven_billion();
  request.shape = {.layers = *rc::gen::inRange<std::uint64_t>(1, 9),
                   .hidden = 1024,
                   .heads = 16,
                   .vocab = 1000 * *rc::gen::inRange<std::uint64_t>(0, 50),
                   .seq = 512};
  request.batch = *rc::gen::inRange(1, 9);
  request.recompute = *rc::gen::arbitrary<bool>();
  request.cluster.devices_per_node = *rc::gen::inRange<std::uint64_t>(1, 3);
  const auto part = [](double most) {
    return most * std::pow(2.0, -double(*rc::gen::inRange(0, 60)) / 10);
  };
  request.cluster.device_bytes = part(4e9);
  request.cluster.host_bytes = part(8e9);
  request.cluster.nvme_bytes = *rc::gen::element(0.0, part(16e9), part(16e9));
  return request;
}

RC_GTEST_PROP(Advice, WithTheLeastOfATierItFitsAndWithLessItDoesNot, ()) {
  const Request request = any_request();
  const Advice advice = ok(advise(request));
  for (const Tier tier : kTiers) {
    const std::optional<double> bytes = least(advice, tier);
    if (!bytes) {
      RC_ASSERT(!advice.fits());
      continue;
    }
    if (advice.fits()) RC_ASSERT(*bytes <= advice.footprint.on(tier));
    if (tier == Tier::kNvme && request.cluster.nvme_bytes <= 0) continue;
    Request tight = request;
    set_memory(tight, tier, std::max(printed(*bytes), 1.0));
    RC_ASSERT(ok(advise(tight)).fits());
    set_memory(tight, tier, 0.95 * *bytes);
    if (check(tight).ok()) RC_ASSERT(!ok(advise(tight)).fits() || *bytes == 0);
  }
}

RC_GTEST_PROP(Advice, WhatIsShortIsWhatTheLeastSays, ()) {
  Request request = any_request();
  request.cluster.device_bytes /= 100;
  request.cluster.host_bytes /= 100;
  const Advice advice = ok(advise(request));
  if (advice.fits()) return;
  bool alone = false;  // more of one tier would do
  for (const Tier tier : kTiers) alone |= least(advice, tier).has_value();
  RC_ASSERT(alone == (advice.shortages.size() == 1));
  if (alone) {
    RC_ASSERT(advice.shortages[0].needs ==
              *least(advice, advice.shortages[0].tier));
  }
}

TEST(Advice, TheHostIsNamedWhereItIsShort) {
  Request request = seven_billion();
  request.cluster.host_bytes = 1e9;
  const Advice advice = ok(advise(request));
  ASSERT_EQ(advice.shortages.size(), 1u);
  EXPECT_EQ(advice.shortages[0].tier, Tier::kHost);
  const double needs = advice.shortages[0].needs;
  const std::string size =
      format_bytes_up(static_cast<std::uint64_t>(std::ceil(needs)));
  EXPECT_NE(std::ranges::find(advice.helps, "host memory per process of " +
                                                size + " (--host-memory)"),
            advice.helps.end());
}

TEST(Advice, NothingGoesToNvmeThatBringsNothing) {
  Request request = seven_billion();
  request.shape.layers = 2;
  const Advice advice = ok(advise(request));
  EXPECT_EQ(advice.footprint.on(Tier::kNvme), 0);
  request = seven_billion();
  request.cluster.host_bytes = 1e12;
  EXPECT_EQ(ok(advise(request)).footprint.on(Tier::kNvme), 0);
}

TEST(Advice, WhatDoesNotFitIsToldWithWhatWouldHelp) {
  Request request = seven_billion();
  request.shape.layers = 2000;
  const Advice advice = ok(advise(request));
  ASSERT_FALSE(advice.fits());
  EXPECT_GT(advice.shortages[0].needs, advice.shortages[0].has);
  ASSERT_FALSE(advice.helps.empty());
  EXPECT_NE(advice.helps.back().find("nodes"), std::string::npos);
}

// What a help needs besides its own option is told with it.
TEST(Advice, HelpsNameEveryOptionThatTheyNeed) {
  Request request = seven_billion();
  request.batch = 64;
  request.micro_batches = 1;
  const auto has = [](const Advice& advice, const char* words) {
    return std::ranges::any_of(advice.helps, [&](const std::string& help) {
      return help.find(words) != std::string::npos;
    });
  };
  EXPECT_TRUE(has(ok(advise(request)), ", without --micro-batches)"));
  request = seven_billion();
  request.shape.layers = 2000;
  EXPECT_TRUE(has(ok(advise(request)), " nodes (--nodes "));
  EXPECT_FALSE(has(ok(advise(request)), "--network-rate"));
  request.cluster.node_network_rate = 0;
  EXPECT_TRUE(has(ok(advise(request)), ", and --network-rate between them)"));
}

// What a user has found.
TEST(Advice, MicroBatchesAreOfWholeSamples) {
  Request request = seven_billion();
  request.cluster = ok(built_in_cluster("dgx-a100"));
  const auto activations = [&](double batch, std::uint64_t micro) {
    request.batch = batch;
    request.micro_batches = micro;
    return ok(advise(request)).footprint.on(Tier::kDevice);
  };
  EXPECT_EQ(activations(3, 2), activations(4, 2));
  EXPECT_EQ(activations(7, 4), activations(8, 4));
  EXPECT_LT(activations(8, 8), activations(8, 4));
}

TEST(Advice, Fp32IsSlowerWhereDevicesAre) {
  Request request = seven_billion();
  request.cluster = ok(built_in_cluster("dgx-a100"));
  const double bf16 = ok(advise(request)).step.compute_seconds;
  request.precision = "fp32";
  EXPECT_NEAR(ok(advise(request)).step.compute_seconds / bf16, 312 / 19.5,
              1e-6);
}

TEST(Advice, ActivationsOnNvmePassThroughTheHost) {
  plan::Setup setup;
  setup.shape = seven_billion().shape;
  setup.cluster = ok(built_in_cluster("dgx-a100"));
  setup.batch = 32;
  setup.placement.activations = Tier::kNvme;
  EXPECT_NEAR(footprint(setup).on(Tier::kHost),
              kept_activation_bytes(setup, 32) * 3 / 32, 1);
}

TEST(Advice, BytesOfTheNetworkAreThoseBetweenNodes) {
  Request request = seven_billion();
  request.cluster = ok(built_in_cluster("dgx-a100"));
  request.cluster.nodes = 4;
  const Advice advice = ok(advise(request));
  // Two gathers and a sum of 2 bytes, three quarters of which other nodes have.
  EXPECT_NEAR(
      advice.step.lane(Lane::kNetwork).bytes * 8 / total_params(request.shape),
      3 * 2 * 0.75, 1e-6);
}

TEST(Advice, NumbersHaveNoExponents) {
  EXPECT_EQ(number_text(0), "0");
  EXPECT_EQ(number_text(0.000012345), "0.0000123");
  EXPECT_EQ(number_text(3e-7), "0.000000300");
  EXPECT_EQ(number_text(0.25), "0.25");
  EXPECT_EQ(number_text(1234567), "1,234,567");
}

// Where devices compute in host memory the engine moves parameters, not layers,
// and a weight is used where it was read to.
TEST(Advice, AHostNeedsNoMoreThanItsLargestUpdateOrSomeParts) {
  Request request;
  request.shape = {.name = "640M",
                   .layers = 12,
                   .hidden = 2048,
                   .heads = 16,
                   .vocab = 16384,
                   .seq = 64};
  request.precision = "fp32";
  request.recompute = false;
  request.activation_bytes = 181e6;
  request.cluster = {.name = "here",
                     .host_bytes = 24e9,
                     .nvme_bytes = 1e12,
                     .on_host = true,
                     .peak_flops = 1e11,
                     .host_memory_rate = 20e9,
                     .nvme_read_rate = 3e9,
                     .nvme_write_rate = 3e9};
  const double largest = 16384 * 2048;
  const double part = total_params(request.shape) / 48;
  const double needs =
      std::max(3 * part, largest) * 12 + 4 * largest + 181e6 + 40e6;
  EXPECT_LT(*least(ok(advise(request)), Tier::kHost), needs);
}

TEST(Advice, ADeviceThatIsTooSmallForAnOperatorIsHelpedByTiles) {
  Request request = seven_billion();
  request.shape = {.layers = 2, .hidden = 65536, .heads = 512};
  request.batch = 1;
  request.cluster.host_bytes = 2e12;
  request.cluster.nvme_bytes = 30e12;
  const Advice advice = ok(advise(request));
  ASSERT_FALSE(advice.fits());
  EXPECT_EQ(advice.shortages[0].tier, Tier::kDevice);
  ASSERT_FALSE(advice.helps.empty());
  EXPECT_NE(advice.helps[0].find("tiles"), std::string::npos);
}

TEST(Advice, TokensTakeTimeAndMoney) {
  Request request = seven_billion();
  request.tokens = 1e9;
  request.cluster.price_per_hour = 0.5;
  const Advice advice = ok(advise(request));
  EXPECT_NEAR(advice.seconds_to_tokens * advice.tokens_per_second, 1e9, 1);
  EXPECT_NEAR(*advice.cost, advice.seconds_to_tokens / 3600 * 0.5, 1e-6);
}

TEST(Advice, DrivesAreWrittenByWhatIsMoved) {
  Request request = seven_billion();
  request.cluster.host_bytes = 32e9;
  const Advice advice = ok(advise(request));
  ASSERT_TRUE(advice.fits());
  ASSERT_EQ(advice.setup.placement.states, Tier::kNvme);
  EXPECT_NEAR(
      advice.written_per_drive_day,
      advice.step.lane(Lane::kNvmeWrite).bytes / advice.step.seconds * 86400,
      1);
  EXPECT_GT(advice.written_per_drive_day, 0);
}

TEST(Advice, BadRequestsAreTold) {
  Request request = seven_billion();
  request.micro_batches = 5;
  EXPECT_NE(advise(request).status().text().find("more micro-batches"),
            std::string::npos);
  request = seven_billion();
  request.precision = "int4";
  EXPECT_NE(advise(request).status().text().find("unknown precision"),
            std::string::npos);
  request = seven_billion();
  request.tokens = -1;
  EXPECT_FALSE(advise(request).ok());
}

RC_GTEST_PROP(Advice, NeverQuickerWhenARateFalls, ()) {
  const Request request = any_request();
  const Advice before = ok(advise(request));
  RC_PRE(before.fits());
  Request slower = request;
  slower.cluster.nvme_read_rate *= 0.5;
  slower.cluster.link_rate *= 0.7;
  RC_ASSERT(ok(advise(slower)).step.seconds >=
            (1 - 1e-8) * before.step.seconds);
}

RC_GTEST_PROP(Advice, NeverSlowerWithMoreMemory, ()) {
  const Request request = any_request();
  const Advice before = ok(advise(request));
  RC_PRE(before.fits());
  for (double Cluster::* member :
       {&Cluster::device_bytes, &Cluster::host_bytes, &Cluster::nvme_bytes}) {
    Request roomier = request;
    roomier.cluster.*member *= 1 + double(*rc::gen::inRange(1, 300)) / 100;
    const Advice after = ok(advise(roomier));
    RC_ASSERT(after.fits());
    RC_ASSERT(after.step.seconds <= (1 + 1e-8) * before.step.seconds);
  }
}

TEST(Advice, EveryGigabyteOfHostMemoryHelpsOrDoesNothing) {
  Request request = seven_billion();
  request.shape.seq = 1024;
  double before = std::numeric_limits<double>::infinity();
  for (double bytes = 9e9; bytes < 140e9; bytes *= 1.04) {
    request.cluster.host_bytes = bytes;
    const Advice advice = ok(advise(request));
    if (!advice.fits()) continue;
    EXPECT_LE(advice.step.seconds, (1 + 1e-8) * before) << bytes;
    before = advice.step.seconds;
  }
  EXPECT_LT(before, 1e9);
}

std::string refusal(std::string_view text) {
  const auto swept = what_if(seven_billion(), text);
  EXPECT_FALSE(swept.ok()) << text;
  return swept.ok() ? "" : swept.status().text();
}

TEST(WhatIf, SweepsOneValue) {
  const auto swept = ok(what_if(seven_billion(), "device_memory=24GB,80GB"));
  ASSERT_EQ(swept.size(), 2u);
  EXPECT_EQ(swept[1].value, "80GB");
  EXPECT_DOUBLE_EQ(swept[1].request.cluster.device_bytes, 80e9);
  EXPECT_DOUBLE_EQ(ok(what_if(seven_billion(), "nvme_read_rate=7GB/s"))[0]
                       .request.cluster.nvme_read_rate,
                   7e9);
}

TEST(WhatIf, ChangesComeInAnyOrder) {
  Request one = seven_billion();
  Request other = one;
  Changes changes = {{"activation_bytes", "8GB"},
                     {"host_memory", "64GB"},
                     {"devices_per_node", "4"},
                     {"batch", "8"}};
  ASSERT_TRUE(set_all(one, changes).ok());
  std::ranges::reverse(changes);
  ASSERT_TRUE(set_all(other, changes).ok());
  EXPECT_EQ(one.cluster.host_bytes, 256e9);
  EXPECT_EQ(one.activation_bytes, 8e9);
  EXPECT_EQ(other.cluster.host_bytes, one.cluster.host_bytes);
  EXPECT_EQ(other.activation_bytes, one.activation_bytes);
}

TEST(WhatIf, MeasuredActivationsFollowTheBatch) {
  Request request = seven_billion();
  request.recompute = false;
  request.activation_bytes = 8e9;  // of a batch of 4
  const auto all = ok(what_if(request, "batch=2,8"));
  EXPECT_EQ(all[0].request.activation_bytes, 4e9);
  EXPECT_EQ(all[1].request.activation_bytes, 16e9);
  request.recompute = true;
  EXPECT_EQ(check(request).code(), Code::kInvalid);
}

TEST(WhatIf, BothWaysOfADriveChangeWhatTheyDoTogether) {
  Request request = seven_billion();
  request.cluster.nvme_read_rate = request.cluster.nvme_write_rate = 5e9;
  request.cluster.nvme_rate = 5e9;
  ASSERT_TRUE(set_all(request, {{"nvme_read_rate", "1GB/s"},
                                {"nvme_write_rate", "1GB/s"}})
                  .ok());
  EXPECT_NEAR(request.cluster.nvme_rate, 1e9, 1);
}

TEST(WhatIf, MemoryIsOfAProcess) {
  Request request = seven_billion();
  request.cluster.devices_per_node = 4;
  ASSERT_TRUE(set(request, "host_memory", "10GB").ok());
  EXPECT_DOUBLE_EQ(request.cluster.host_bytes, 40e9);
}

TEST(WhatIf, BadOnesAreTold) {
  EXPECT_NE(refusal("device_memory").find("write a name and values"),
            std::string::npos);
  EXPECT_NE(refusal("device_memry=1GB").find("did you mean device_memory?"),
            std::string::npos);
  EXPECT_NE(refusal("elephants=1").find("known are"), std::string::npos);
  EXPECT_NE(refusal("device_memory=24G").find("\"24GB\" (decimal)"),
            std::string::npos);
  EXPECT_NE(refusal("nodes=0").find("nodes must be from 1"), std::string::npos);
  EXPECT_NE(refusal("nodes=1.5").find("must be a whole number"),
            std::string::npos);
  EXPECT_NE(refusal("batch=x").find("not a number"), std::string::npos);
  EXPECT_NE(refusal("batch=1e30").find("must be from 0 to 10^18"),
            std::string::npos);
}

}  // namespace
}  // namespace zinf::plan
