#include "zinf/log.h"

#include <gtest/gtest.h>

#include <string>

namespace zinf {
namespace {

class Log : public testing::Test {
 protected:
  void TearDown() override {
    set_log_level(LogLevel::kWarning);
    set_log_rank(-1);
  }
};

TEST_F(Log, PrefixesLevelAndRank) {
  set_log_rank(3);
  testing::internal::CaptureStderr();
  log(LogLevel::kWarning, "%d of %s", 7, "nine");
  std::string line = testing::internal::GetCapturedStderr();
  EXPECT_NE(line.find("rank 3 warning: 7 of nine\n"), std::string::npos)
      << line;
}

TEST_F(Log, DropsLinesBelowTheLevel) {
  set_log_level(LogLevel::kError);
  testing::internal::CaptureStderr();
  log(LogLevel::kWarning, "hidden");
  log(LogLevel::kError, "seen");
  std::string line = testing::internal::GetCapturedStderr();
  EXPECT_EQ(line.find("hidden"), std::string::npos);
  EXPECT_NE(line.find("seen"), std::string::npos);
}

}  // namespace
}  // namespace zinf
