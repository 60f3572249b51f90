#include "zinf/advice.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "tests/support/ok.h"
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

TEST(Advice, TheLeastBudgetsAreEnoughAndLessIsNot) {
  const Request request = seven_billion();
  const LeastBudgets least = ok(advise(request)).least;
  Request tight = request;
  tight.cluster.device_bytes = 1.001 * least.device;
  tight.cluster.host_bytes = 1.001 * least.host;
  tight.cluster.nvme_bytes = 1.001 * least.nvme;
  EXPECT_TRUE(ok(advise(tight)).fits());
  for (double Cluster::* member :
       {&Cluster::device_bytes, &Cluster::host_bytes, &Cluster::nvme_bytes}) {
    Request less = tight;
    less.cluster.*member *= 0.9;
    EXPECT_FALSE(ok(advise(less)).fits());
  }
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

RC_GTEST_PROP(Advice, NeverQuickerWhenARateFallsNorSlowerWithMoreMemory, ()) {
  Request request = seven_billion();
  request.shape.layers = *rc::gen::inRange<std::uint64_t>(1, 6);
  request.shape.hidden = 1024;
  request.shape.vocab = 0;
  request.batch = *rc::gen::inRange(1, 5);
  const auto scaled = [](double most) {
    return most * double(*rc::gen::inRange(20, 100)) / 100;
  };
  request.cluster.device_bytes = scaled(2e9);
  request.cluster.host_bytes = scaled(4e9);
  request.cluster.nvme_bytes = scaled(8e9);
  const Advice before = ok(advise(request));
  RC_PRE(before.fits());
  Request slower = request;
  slower.cluster.nvme_read_rate *= 0.5;
  slower.cluster.link_rate *= 0.7;
  RC_ASSERT(ok(advise(slower)).step.seconds >=
            (1 - 1e-9) * before.step.seconds);
  Request roomier = request;
  roomier.cluster.device_bytes *= 4;
  roomier.cluster.nvme_bytes *= 4;
  RC_ASSERT(ok(advise(roomier)).step.seconds <=
            (1 + 1e-9) * before.step.seconds);
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
