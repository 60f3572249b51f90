#include "zinf/cast.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "zinf/thread_pool.h"

namespace zinf {
namespace {

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

std::uint16_t narrow_one(float x, Dtype dtype) {
  std::uint16_t half = 0;
  narrow(&x, dtype, &half, 1);
  return half;
}

float widen_one(std::uint16_t half, Dtype dtype) {
  float x = 0;
  widen(dtype, &half, &x, 1);
  return x;
}

float split_and_join(float x) {
  std::uint16_t high = 0;
  std::uint16_t low = 0;
  split_master(&x, &high, &low, 1);
  EXPECT_EQ(high, narrow_one(x, Dtype::kBFloat16));
  float back = 0;
  join_master(&high, &low, &back, 1);
  return back;
}

// The value of a finite fp16 by its definition.
double fp16_value(std::uint16_t half) {
  int exponent = (half >> 10) & 31;
  int mantissa = half & 1023;
  double magnitude = exponent == 0 ? std::ldexp(mantissa, -24)
                                   : std::ldexp(mantissa + 1024, exponent - 25);
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(Cast, RoundsToBf16WithTiesAwayFromZero) {
  auto bf16 = [](std::uint32_t bits) {
    return narrow_one(from_bits(bits), Dtype::kBFloat16);
  };
  EXPECT_EQ(bf16(0x3F808000), 0x3F81);  // a tie: nearest-even says 0x3F80
  EXPECT_EQ(bf16(0xBF808000), 0xBF81);
  EXPECT_EQ(bf16(0x3F807FFF), 0x3F80);
  EXPECT_EQ(bf16(0x3F818000), 0x3F82);
  EXPECT_EQ(bf16(0x00008000), 0x0001);
  EXPECT_EQ(bf16(0x80000000), 0x8000);
  EXPECT_EQ(bf16(0x7F7FFFFF), 0x7F80);  // overflows
  EXPECT_EQ(bf16(0xFF800000), 0xFF80);
}

TEST(Cast, MakesOneNanOfAll) {
  for (std::uint32_t bits :
       {0x7F800001U, 0x7FFFFFFFU, 0xFFC00000U, 0xFFFFFFFFU, 0xFF80FFFFU}) {
    float nan = from_bits(bits);
    EXPECT_EQ(narrow_one(nan, Dtype::kBFloat16), 0x7FC0);
    EXPECT_EQ(narrow_one(nan, Dtype::kFloat16), 0x7E00);
    EXPECT_EQ(bits_of(split_and_join(nan)), 0x7FC00000U);
  }
  for (std::uint16_t half : {0x7C01, 0x7FFF, 0xFE00, 0xFFFF}) {
    EXPECT_EQ(bits_of(widen_one(half, Dtype::kFloat16)), 0x7FC00000U);
  }
}

TEST(Cast, WidensEveryFp16Exactly) {
  for (int half = 0; half < 0x10000; ++half) {
    auto h = static_cast<std::uint16_t>(half);
    if ((h & 0x7C00) == 0x7C00) continue;
    float x = widen_one(h, Dtype::kFloat16);
    ASSERT_EQ(x, fp16_value(h)) << half;
    ASSERT_EQ(std::signbit(x), (h & 0x8000) != 0) << half;
    ASSERT_EQ(narrow_one(x, Dtype::kFloat16), h) << half;
  }
  EXPECT_EQ(bits_of(widen_one(0x7C00, Dtype::kFloat16)), 0x7F800000U);
  EXPECT_EQ(bits_of(widen_one(0xFC00, Dtype::kFloat16)), 0xFF800000U);
}

// Between each two neighbours: the middle goes to the even one, the floats
// beside the middle to the nearer one.
TEST(Cast, RoundsToTheNearestFp16WithTiesToEven) {
  for (std::uint16_t sign : {0x0000, 0x8000}) {
    for (int half = 0; half < 0x7C00; ++half) {
      auto lower = static_cast<std::uint16_t>(half | sign);
      auto upper = static_cast<std::uint16_t>(lower + 1);
      double above =
          half == 0x7BFF ? (sign != 0 ? -65536.0 : 65536.0) : fp16_value(upper);
      auto middle = static_cast<float>((fp16_value(lower) + above) / 2);
      std::uint16_t even = half % 2 == 0 ? lower : upper;
      ASSERT_EQ(narrow_one(middle, Dtype::kFloat16), even) << half;
      float nearer = std::nextafter(middle, 0.0F);
      ASSERT_EQ(narrow_one(nearer, Dtype::kFloat16), lower) << half;
      float further = std::nextafter(middle, sign != 0 ? -1e9F : 1e9F);
      ASSERT_EQ(narrow_one(further, Dtype::kFloat16), upper) << half;
    }
  }
  float huge = std::numeric_limits<float>::max();
  EXPECT_EQ(narrow_one(huge, Dtype::kFloat16), 0x7C00);
  EXPECT_EQ(narrow_one(-huge, Dtype::kFloat16), 0xFC00);
}

TEST(Cast, SplitMastersComeBackForEveryLowHalf) {
  for (std::uint32_t high : {0x0000U, 0x3F80U, 0x3F81U, 0x7F7FU, 0x8000U,
                             0x8001U, 0xBF80U, 0xFF7FU}) {
    for (std::uint32_t low = 0; low < 0x10000; ++low) {
      std::uint32_t bits = (high << 16) | low;
      ASSERT_EQ(bits_of(split_and_join(from_bits(bits))), bits);
    }
  }
  EXPECT_EQ(bits_of(split_and_join(from_bits(0x7F800000))), 0x7F800000U);
}

RC_GTEST_PROP(Cast, SplitMastersComeBack, (std::uint32_t bits)) {
  RC_PRE((bits & 0x7FFFFFFFU) <= 0x7F800000U);
  RC_ASSERT(bits_of(split_and_join(from_bits(bits))) == bits);
}

TEST(Cast, EditedWeightsBecomeTheirMasters) {
  for (Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    std::vector<float> master(5000);
    for (std::size_t i = 0; i < master.size(); ++i) {
      master[i] = 0.001F * static_cast<float>(i) + 0.3F;
    }
    std::vector<std::uint16_t> weight(master.size());
    narrow(master.data(), dtype, weight.data(), master.size());
    std::vector<float> before = master;
    EXPECT_EQ(follow_edits(dtype, weight.data(), master.data(), master.size()),
              0u);
    EXPECT_EQ(master, before) << "nothing was edited";
    std::vector<float> edit = {-2.5F};
    for (std::size_t i : {0, 2047, 2048, 4999}) {
      narrow(edit.data(), dtype, &weight[i], 1);
      before[i] = -2.5F;
    }
    EXPECT_EQ(follow_edits(dtype, weight.data(), master.data(), master.size()),
              4u);
    EXPECT_EQ(master, before) << "only what was edited follows";
  }
}

TEST(Cast, ThreadsChangeNothing) {
  constexpr std::size_t kCount = 70'001;
  std::mt19937 random(3);
  std::vector<float> master(kCount);
  for (float& x : master) x = from_bits(static_cast<std::uint32_t>(random()));
  auto pool = ThreadPool::create(3).value();
  auto run = [&](ThreadPool* threads) {
    std::vector<std::uint16_t> bf16(kCount), fp16(kCount), high(kCount),
        low(kCount);
    std::vector<float> widened(kCount), joined(kCount), copied(kCount);
    narrow(master.data(), Dtype::kBFloat16, bf16.data(), kCount, threads);
    narrow(master.data(), Dtype::kFloat16, fp16.data(), kCount, threads);
    narrow(master.data(), Dtype::kFloat32, copied.data(), kCount, threads);
    widen(Dtype::kFloat16, fp16.data(), widened.data(), kCount, threads);
    split_master(master.data(), high.data(), low.data(), kCount, threads);
    join_master(high.data(), low.data(), joined.data(), kCount, threads);
    std::vector<std::uint32_t> all;
    for (std::size_t i = 0; i < kCount; ++i) {
      all.insert(all.end(),
                 {bf16[i], fp16[i], high[i], low[i], bits_of(widened[i]),
                  bits_of(joined[i]), bits_of(copied[i])});
    }
    return all;
  };
  EXPECT_EQ(run(pool.get()), run(nullptr));
}

}  // namespace
}  // namespace zinf
