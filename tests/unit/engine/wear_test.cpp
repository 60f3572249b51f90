#include "src/engine/wear.h"

#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <chrono>
#include <filesystem>

#include "tests/support/temp_dir.h"

namespace zinf {
namespace {

using std::chrono::hours;

TEST(Wear, TellsRatesSinceTheFirstStep) {
  constexpr std::uint64_t kGb = 1'000'000'000;
  Wear wear(600'000 * kGb);
  EXPECT_EQ(wear.stats().steps, 0u);
  EXPECT_EQ(wear.stats().bytes_per_step, 0u);
  Wear::Time begin{};
  wear.count_step(700 * kGb, begin);  // with all that is written once
  EXPECT_EQ(wear.stats().bytes_per_step, 700 * kGb);
  EXPECT_EQ(wear.stats().tb_per_day, 0);
  for (int step = 1; step <= 4; ++step) {
    wear.count_step((700 + 500 * step) * kGb, begin + step * hours(6));
  }
  WearStats stats = wear.stats();
  EXPECT_EQ(stats.steps, 5u);
  EXPECT_EQ(stats.bytes_per_step, 500 * kGb);
  EXPECT_DOUBLE_EQ(stats.tb_per_day, 2);
  EXPECT_DOUBLE_EQ(stats.life_per_day, 2.0 / 600);
  EXPECT_DOUBLE_EQ(stats.life_per_year, 2.0 / 600 * 365);
  EXPECT_EQ(stats.endurance_bytes, 600'000 * kGb);
}

TEST(Wear, DrivesAreRatedByTheirSizeAndCountOnce) {
  TempDir dir;
  std::filesystem::create_directory(dir.file("a"));
  struct statvfs disk{};
  ASSERT_EQ(statvfs(dir.path().c_str(), &disk), 0);
  double bytes =
      static_cast<double>(disk.f_blocks) * static_cast<double>(disk.f_frsize);
  std::uint64_t one = default_endurance({{dir.path()}});
  EXPECT_NEAR(static_cast<double>(one) / bytes, 0.3 * 365 * 5, 1e-6);
  EXPECT_EQ(default_endurance({{dir.path()}, {dir.file("a")}}), one);
  EXPECT_EQ(default_endurance({}), 0u);
}

}  // namespace
}  // namespace zinf
