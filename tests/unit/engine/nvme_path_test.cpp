#include "zinf/nvme_path.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "tests/support/temp_dir.h"

namespace zinf {
namespace {

class NvmePathTest : public testing::Test {
 protected:
  std::string made(const std::string& name) {
    std::filesystem::create_directory(dir_.file(name));
    return dir_.file(name);
  }
  static NvmePath parsed(const std::string& text) {
    Result<NvmePath> path = parse_nvme_path(text);
    EXPECT_TRUE(path.ok()) << path.status().text();
    return path.ok() ? *path : NvmePath{};
  }
  static std::string refused(const std::string& text) {
    Status status = parse_nvme_path(text).status();
    EXPECT_EQ(status.code(), Code::kInvalid) << text;
    return status.text();
  }

  TempDir dir_;
};

TEST_F(NvmePathTest, ALimitFollowsTheLastColon) {
  std::string plain = made("plain");
  EXPECT_EQ(parsed(plain).path, plain);
  EXPECT_EQ(parsed(plain).limit_bytes, 0u);
  EXPECT_EQ(parsed(plain + ":500GB").path, plain);
  EXPECT_EQ(parsed(plain + ":500GB").limit_bytes, 500'000'000'000u);
  EXPECT_EQ(parsed(plain + ":1.5 MiB").limit_bytes, 3u << 19);
  EXPECT_EQ(parsed(plain + ":4096").limit_bytes, 4096u);
}

TEST_F(NvmePathTest, APathMayHaveColonsItself) {
  std::string colon = made("a:b");
  EXPECT_EQ(parsed(colon).path, colon);
  EXPECT_EQ(parsed(colon).limit_bytes, 0u);
  EXPECT_EQ(parsed(colon + ":1GB").path, colon);
  EXPECT_EQ(parsed(colon + ":1GB").limit_bytes, 1'000'000'000u);
  std::string looks_like_a_limit = made("c:5GB");
  EXPECT_EQ(parsed(looks_like_a_limit).path, looks_like_a_limit);
  EXPECT_EQ(parsed(looks_like_a_limit).limit_bytes, 0u);
  // Neither is there: whoever looks for the directory says so.
  EXPECT_EQ(parsed(dir_.file("none:b")).path, dir_.file("none:b"));
}

TEST_F(NvmePathTest, WhatIsNoSizeIsNamed) {
  std::string plain = made("plain");
  for (const char* size : {"5XB", "", "-1GB", "5G", "0", "0GB"}) {
    std::string text = plain + ":" + size;
    EXPECT_NE(refused(text).find(text), std::string::npos) << refused(text);
  }
}

TEST_F(NvmePathTest, TheLocalRankIsPutIn) {
  std::string third = made("3");
  setenv("LOCAL_RANK", "3", 1);
  EXPECT_EQ(parsed(dir_.file("{local_rank}:1GB")).path, third);
  EXPECT_EQ(parsed(dir_.file("{local_rank}:1GB")).limit_bytes, 1'000'000'000u);
  unsetenv("LOCAL_RANK");
  EXPECT_EQ(parsed(dir_.file("{local_rank}")).path, dir_.file("0"));
}

}  // namespace
}  // namespace zinf
