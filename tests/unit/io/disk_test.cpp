#include "zinf/disk.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temp_dir.h"

namespace zinf::io {
namespace {

TEST(Disk, DescribesTheDiskOfADirectory) {
  TempDir dir;
  Result<Disk> disk = inspect_disk(dir.path());
  ASSERT_TRUE(disk.ok()) << disk.status().text();
  EXPECT_FALSE(disk->file_system.empty());
  EXPECT_GT(disk->total_bytes, disk->free_bytes);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  EXPECT_EQ(inspect_disk(dir.file("missing")).status().code(), Code::kNotFound);
}

TEST(Profile, IsReadBackAsItWasWritten) {
  TempDir dir;
  EXPECT_EQ(load_profile(dir.path()).status().code(), Code::kNotFound);
  Profile profile{
      .block_bytes = 1 << 20, .depth = 8, .read_gbps = 3.5, .write_gbps = 2.5};
  ASSERT_TRUE(save_profile(dir.path(), profile).ok());
  Result<Profile> back = load_profile(dir.path());
  ASSERT_TRUE(back.ok()) << back.status().text();
  EXPECT_EQ(back->block_bytes, profile.block_bytes);
  EXPECT_EQ(back->depth, profile.depth);
  EXPECT_EQ(back->read_gbps, profile.read_gbps);
  EXPECT_EQ(back->write_gbps, profile.write_gbps);
}

TEST(Profile, RefusesWhatMakesNoSense) {
  TempDir dir;
  for (const char* text :
       {"", "{", "[]", "{\"block\": 1}",
        R"({"block":"x","depth":1,"read_gbps":1,"write_gbps":1})",
        R"({"block":1000,"depth":1,"read_gbps":1,"write_gbps":1})",
        R"({"block":1e300,"depth":-5,"read_gbps":1,"write_gbps":1})"}) {
    std::ofstream(dir.file(kProfileName)) << text;
    Result<Profile> profile = load_profile(dir.path());
    EXPECT_EQ(profile.status().code(), Code::kCorrupt) << text;
    EXPECT_NE(profile.status().text().find("zinf io tune"), std::string::npos);
  }
}

}  // namespace
}  // namespace zinf::io
