// Limits on NVMe and what is told about wear, in C++.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/temp_dir.h"
#include "tests/unit/torch/training.h"

namespace zinf {
namespace {

EngineOptions limited(const std::string& path, const std::string& limit) {
  EngineOptions options = on_nvme(path);
  options.nvme = path + ":" + limit;
  return options;
}

TEST(Space, AnNvmePathMayHaveALimit) {
  TempDir dir;
  auto refusal = [](const EngineOptions& options) {
    return error_of([&] { Engine engine(options); });
  };
  EXPECT_EQ(refusal(limited(dir.path(), "500GB")), "");
  for (const char* size : {"5XB", "0", ""}) {
    EXPECT_TRUE(
        says(refusal(limited(dir.path(), size)), dir.path() + ":" + size));
  }
  EXPECT_TRUE(says(refusal(limited(dir.path() + "/none", "1GB")),
                   "does not exist: name a directory"));
  EXPECT_TRUE(says(refusal({.nvme = dir.path(), .nvme_endurance = "much"}),
                   "nvme_endurance: "));
}

TEST(Space, TooLittleIsToldBeforeTheFirstStep) {
  TempDir dir;
  Engine engine(limited(dir.path(), "256KiB"));
  Net net = make_net(&engine);
  auto before = contents(*net);
  try {
    AdamW optimizer(net->parameters());
    ADD_FAILURE() << "it should not fit";
  } catch (const BudgetError& error) {
    for (const std::string& part :
         {std::string("on NVMe"), dir.path(), std::string("needed"),
          std::string("256 KiB found (its limit)")}) {
      EXPECT_TRUE(says(error.what(), part));
    }
  }
  EXPECT_TRUE(same_bits(contents(*net), before));
}

TEST(Space, WearIsTold) {
  TempDir dir;
  EngineOptions options = limited(dir.path(), "64MiB");
  options.nvme_endurance = "600TB";
  Engine engine(options);
  Net net = make_net(&engine);
  AdamW optimizer(net->parameters());
  EXPECT_EQ(engine.stats().steps, 0);
  train(net, optimizer, 4);
  EngineStats stats = engine.stats();
  EXPECT_EQ(stats.steps, 4);
  EXPECT_EQ(stats.nvme_endurance_bytes, 600'000'000'000'000u);
  EXPECT_GE(stats.nvme_write_bytes_per_step, 3 * stats.weights_bytes);
  EXPECT_GT(stats.nvme_write_tb_per_day, 0);
  EXPECT_DOUBLE_EQ(stats.nvme_life_per_day, stats.nvme_write_tb_per_day / 600);
  EXPECT_DOUBLE_EQ(stats.nvme_life_per_year, 365 * stats.nvme_life_per_day);
}

}  // namespace
}  // namespace zinf
