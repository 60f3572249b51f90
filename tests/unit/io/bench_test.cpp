#include "zinf/io_bench.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "src/base/align.h"
#include "tests/support/temp_dir.h"

namespace zinf::io {
namespace {

Options small() { return {.block_bytes = 64 * kKiB, .depth = 4}; }

TEST(Bench, MeasuresEveryDirectionAndVerifies) {
  TempDir dir;
  // Not a multiple of a request, so that the last one is shorter.
  Result<Bench> bench = Bench::in_directory(dir.path(), 5 * kMiB + 12 * kKiB);
  ASSERT_TRUE(bench.ok()) << bench.status().text();
  ASSERT_TRUE(bench->open(small()).ok());
  for (Direction direction :
       {Direction::kRead, Direction::kWrite, Direction::kMix}) {
    Result<Sample> sample = bench->run(direction);
    ASSERT_TRUE(sample.ok()) << sample.status().text();
    // A mix moves an even number of requests of 128 KiB.
    EXPECT_EQ(sample->bytes, direction == Direction::kMix
                                 ? 40 * 128 * kKiB
                                 : 5 * kMiB + 12 * kKiB);
    EXPECT_GT(sample->gbps(), 0);
  }
  for (Direction direction : {Direction::kRead, Direction::kWrite}) {
    Result<Sample> plain = bench->run_plain(direction, 3);
    ASSERT_TRUE(plain.ok()) << plain.status().text();
  }
  Status verified = bench->verify();
  EXPECT_TRUE(verified.ok()) << verified.text();
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));  // the file has no name
}

TEST(Bench, VerifyNoticesOneWrongByte) {
  TempDir dir;
  std::string path = dir.file("data");
  std::ofstream(path) << std::string(2 * kMiB, 'x');
  Result<Bench> bench = Bench::on_file(path);
  ASSERT_TRUE(bench.ok()) << bench.status().text();
  ASSERT_TRUE(bench->open(small()).ok());
  ASSERT_TRUE(bench->verify().ok());
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(1234567);
  auto byte = static_cast<char>(file.get());
  file.seekp(1234567);
  file.put(static_cast<char>(byte ^ 1));
  file.close();
  Status verified = bench->verify();
  EXPECT_EQ(verified.code(), Code::kCorrupt);
  EXPECT_NE(verified.text().find("byte 1234567"), std::string::npos)
      << verified.text();
}

// The disk says yes and does nothing: the layout takes 24 blocks, the fault
// comes in the pass after it.
TEST(Bench, NoticesALostWrite) {
  TempDir dir;
  Result<Bench> bench = Bench::in_directory(dir.path(), 24 * 64 * kKiB);
  Options options = small();
  options.faults = {
      {.kind = Fault::Kind::kLost, .on = Operation::kWrite, .nth = 30}};
  ASSERT_TRUE(bench->open(options).ok());
  ASSERT_TRUE(bench->verify().ok());
  ASSERT_TRUE(bench->run(Direction::kWrite).ok());
  EXPECT_EQ(bench->verify().code(), Code::kCorrupt);
}

TEST(Bench, NoticesALostRead) {
  TempDir dir;
  Result<Bench> bench = Bench::in_directory(dir.path(), 24 * 64 * kKiB);
  Options options = small();
  options.faults = {{.kind = Fault::Kind::kLost,
                     .on = Operation::kRead,
                     .nth = 24,
                     .and_after = true}};
  ASSERT_TRUE(bench->open(options).ok());
  EXPECT_EQ(bench->run(Direction::kRead).status().code(), Code::kCorrupt);
  EXPECT_EQ(bench->verify().code(), Code::kCorrupt);
}

TEST(Bench, MoreMemoryThanThereIsIsRefused) {
  TempDir dir;
  Result<Bench> bench = Bench::in_directory(dir.path(), std::size_t{30} * kGiB);
  if (!bench.ok()) GTEST_SKIP() << bench.status().text();
  Status status = bench->open({.block_bytes = kGiB, .depth = 4096});
  EXPECT_EQ(status.code(), Code::kOverBudget) << status.text();
}

TEST(Bench, RefusesWhatItCannotMeasure) {
  TempDir dir;
  EXPECT_EQ(Bench::in_directory(dir.path(), 100).status().code(),
            Code::kInvalid);
  EXPECT_EQ(Bench::in_directory(dir.file("missing"), kMiB).status().code(),
            Code::kNotFound);
  EXPECT_EQ(
      Bench::in_directory(dir.path(), std::uint64_t{1} << 55).status().code(),
      Code::kNoSpace);
  EXPECT_EQ(Bench::on_file(dir.file("missing")).status().code(),
            Code::kNotFound);
  EXPECT_EQ(Bench::on_file(dir.path()).status().code(), Code::kInvalid);
  Result<Bench> tiny = Bench::in_directory(dir.path(), 4 * kKiB);
  ASSERT_TRUE(tiny.ok());
  ASSERT_TRUE(tiny->open(small()).ok());
  EXPECT_EQ(tiny->run(Direction::kMix).status().code(), Code::kInvalid);
  EXPECT_TRUE(tiny->run(Direction::kRead).ok());
}

}  // namespace
}  // namespace zinf::io
