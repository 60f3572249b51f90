// The fuzz targets without a fuzzer: their seeds, and random changes of them.
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "tests/fuzz/store_target.h"

namespace zinf::tier {
namespace {

// A few bytes changed, cut, doubled or set to a number that readers fear.
Bytes mutated(Bytes data, std::mt19937_64& random) {
  constexpr std::array<std::uint64_t, 8> kFeared = {
      0,           1,        0x7fffffff,         0xffffffff,
      0x100000000, 1u << 20, 0x7fffffffffffffff, ~std::uint64_t{0}};
  for (std::uint64_t count = 1 + random() % 4; count > 0; --count) {
    if (data.empty()) return data;
    std::size_t at = random() % data.size();
    switch (random() % 5) {
      case 0:
        data[at] ^= std::byte(1u << (random() % 8));
        break;
      case 1:
        data[at] = std::byte(random());
        break;
      case 2:
        data.resize(at);
        break;
      case 3:
        data.insert(data.begin() + static_cast<std::ptrdiff_t>(at),
                    random() % 40, std::byte(random()));
        break;
      default:
        std::uint64_t feared = kFeared[random() % kFeared.size()];
        std::size_t width = std::size_t{1} << (random() % 4);
        for (std::size_t i = 0; i < width && at + i < data.size(); ++i) {
          data[at + i] = std::byte(feared >> (8 * i));
        }
    }
  }
  return data;
}

TEST(FormatFuzz, SeedsAreAcceptedAsTheyAre) {
  for (const FuzzTarget& target : fuzz_targets()) {
    ASSERT_FALSE(target.seeds().empty());
    for (const Bytes& seed : target.seeds()) {
      EXPECT_TRUE(target.run(seed)) << target.name;
    }
  }
}

TEST(FormatFuzz, ChangedSeedsNeverCrashTheReaders) {
  std::mt19937_64 random(1);
  for (const FuzzTarget& target : fuzz_targets()) {
    std::vector<Bytes> seeds = target.seeds();
    int accepted = 0;
    constexpr int kRounds = 20'000;
    for (int i = 0; i < kRounds; ++i) {
      Bytes data = mutated(seeds[random() % seeds.size()], random);
      accepted += target.run(data) ? 1 : 0;
    }
    // Neither everything nor nothing: the changes reach all of the reader.
    EXPECT_GT(accepted, 0) << target.name;
    EXPECT_LT(accepted, kRounds) << target.name;
  }
}

}  // namespace
}  // namespace zinf::tier
