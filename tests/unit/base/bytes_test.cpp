#include "zinf/bytes.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <limits>

namespace zinf {
namespace {

std::uint64_t parsed(std::string_view text) {
  Result<std::uint64_t> bytes = parse_bytes(text);
  EXPECT_TRUE(bytes.ok()) << bytes.status().text();
  return bytes.ok() ? bytes.value() : 0;
}

std::string refusal(std::string_view text) {
  Result<std::uint64_t> bytes = parse_bytes(text);
  EXPECT_FALSE(bytes.ok()) << text;
  EXPECT_EQ(bytes.status().code(), Code::kInvalid);
  return bytes.status().text();
}

TEST(Bytes, ParsesDecimalAndBinaryUnits) {
  EXPECT_EQ(parsed("4GB"), 4'000'000'000u);
  EXPECT_EQ(parsed("512MiB"), 512u << 20);
  EXPECT_EQ(parsed("4096"), 4096u);
  EXPECT_EQ(parsed("0"), 0u);
  EXPECT_EQ(parsed("1.5 GiB"), 3u << 29);
  EXPECT_EQ(parsed(" 7 b "), 7u);
  EXPECT_EQ(parsed("2kib"), 2048u);
  EXPECT_EQ(parsed("18446744073709551615"),
            std::numeric_limits<std::uint64_t>::max());
}

TEST(Bytes, RefusesNonsenseWithAHint) {
  EXPECT_NE(refusal("4G").find("\"4GB\" (decimal) or \"4GiB\" (binary)"),
            std::string::npos);
  EXPECT_NE(refusal("1.5m").find("\"1.5MB\""), std::string::npos);
  EXPECT_NE(refusal("-1GB").find("negative"), std::string::npos);
  EXPECT_NE(refusal("18446744073709551616").find("64 bits"), std::string::npos);
  EXPECT_NE(refusal("99999999PB").find("64 bits"), std::string::npos);
  EXPECT_NE(refusal("4 parsecs").find("unknown unit"), std::string::npos);
  for (const char* text : {"", "  ", "GB", "nan", "inf", "1e3GB", "0x10",
                           "4GBB", "4,5GB", "+-3", ".", "0.5"}) {
    refusal(text);
  }
}

TEST(Bytes, FormatsForPeople) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(4096), "4 KiB");
  EXPECT_EQ(format_bytes(3u << 29), "1.5 GiB");
  EXPECT_EQ(format_bytes(12'345'678), "11.8 MiB");
  EXPECT_EQ(format_bytes_up(12'345'678), "11.8 MiB");
  EXPECT_EQ(format_bytes_up(12'400'000), "11.9 MiB");
  EXPECT_EQ(format_bytes_up(3u << 29), "1.5 GiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<std::uint64_t>::max()),
            "16384 PiB");
  EXPECT_EQ(format_rate(3.714e9), "3.71 GB/s");
}

RC_GTEST_PROP(Bytes, FormattedSizesParseBackWithinRounding,
              (std::uint64_t bytes)) {
  Result<std::uint64_t> back = parse_bytes(format_bytes(bytes));
  // 2^64-1 prints as 16384 PiB, which is one too many for 64 bits.
  RC_PRE(back.ok());
  double error =
      std::abs(static_cast<double>(back.value()) - static_cast<double>(bytes));
  RC_ASSERT(error <= 0.006 * static_cast<double>(bytes));
}

RC_GTEST_PROP(Bytes, SizesThatAreRoundedUpAreEnough, (std::uint64_t bytes)) {
  const Result<std::uint64_t> back = parse_bytes(format_bytes_up(bytes));
  RC_PRE(back.ok());
  RC_ASSERT(back.value() >= bytes);
  RC_ASSERT(double(back.value()) <= 1.011 * double(bytes));
}

RC_GTEST_PROP(Bytes, ParsingNeverFailsBadly, (const std::string& text)) {
  Result<std::uint64_t> bytes = parse_bytes(text);
  if (!bytes.ok()) RC_ASSERT(!bytes.status().text().empty());
}

}  // namespace
}  // namespace zinf
