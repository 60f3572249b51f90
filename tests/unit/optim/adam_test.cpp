#include "zinf/adam.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cfenv>
#include <cmath>
#include <limits>
#include <string>

#include "src/optim/adam_with.h"
#include "tests/unit/optim/states.h"
#include "zinf/cast.h"
#include "zinf/thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zinf {
namespace {

constexpr AdamOptions kOptions = {.lr = 1e-2, .weight_decay = 0.1};
constexpr AdamStep kStep = {.step = 2, .inverse_scale = 0.5F, .clip = 0.9F};

void expect_refused(const Status& status,
                    std::initializer_list<const char*> texts) {
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::kInvalid);
  for (const char* text : texts) {
    EXPECT_NE(status.text().find(text), std::string::npos)
        << "no \"" << text << "\" in: " << status.text();
  }
}

TEST(AdamOptions, NamesEveryProblemAtOnce) {
  EXPECT_TRUE(AdamOptions{}.validate().ok());
  double nan = std::numeric_limits<double>::quiet_NaN();
  AdamOptions all_wrong = {.lr = -1,
                           .beta1 = 1,
                           .beta2 = nan,
                           .eps = -1e-9,
                           .weight_decay = HUGE_VAL,
                           .amsgrad = true};
  expect_refused(all_wrong.validate(),
                 {"lr is -1", "beta1 is 1", "beta2 is nan", "eps is -1e-09",
                  "weight_decay is inf", "amsgrad is not supported"});
}

TEST(AdamOptions, AllowsZeroes) {
  AdamOptions zeroes = {
      .lr = 0, .beta1 = 0, .beta2 = 0, .eps = 0, .weight_decay = 0};
  EXPECT_TRUE(zeroes.validate().ok());
}

TEST(AdamBuffers, RefusesWhatCannotBeMeant) {
  States states(100, Dtype::kFloat32, Format::kFloat32, 1);
  AdamBuffers good = states.buffers();
  EXPECT_TRUE(good.validate().ok());

  AdamBuffers bad = good;
  bad.grad = nullptr;
  bad.exp_avg_sq = nullptr;
  bad.remainder = 101;
  expect_refused(bad.validate(),
                 {"grad is null", "exp_avg_sq is null", "remainder is 101"});
  bad = good;
  bad.exp_avg = good.exp_avg_sq + 99;
  bad.grad = static_cast<const std::byte*>(good.grad) + 1;
  expect_refused(bad.validate(),
                 {"exp_avg and exp_avg_sq overlap", "grad at", "not aligned"});
  bad = good;
  double sum = 0;
  bad.count = kSumBlock + 1;
  bad.block_sums = {&sum, 1};
  expect_refused(bad.validate(), {"block_sums has 1", "need 2"});
}

TEST(AdamBuffers, RefusesFormatsThatDoNotExist) {
  States states(8, Dtype::kBFloat16, Format::kBFloat16Master, 1);
  AdamBuffers b = states.buffers();
  std::uint16_t low[8] = {};
  b.low = low;
  expect_refused(b.validate(), {"exclude each other"});
  b.master = nullptr;
  EXPECT_TRUE(b.validate().ok());
  b.weight_dtype = Dtype::kFloat16;
  expect_refused(b.validate(), {"float16 weight cannot be split"});
  b.low = nullptr;
  expect_refused(b.validate(), {"float16 weight needs master"});
  b.weight_dtype = Dtype::kBFloat16;
  expect_refused(b.validate(), {"needs master or low"});

  States fp32(8, Dtype::kFloat32, Format::kFloat32, 1);
  b = fp32.buffers();
  b.low = low;
  expect_refused(b.validate(), {"its own master"});
}

TEST(Adam, WritesNothingWhenItRefuses) {
  States states(50, Dtype::kFloat32, Format::kFloat32, 1);
  auto before = states.contents();
  expect_refused(adam_update(kOptions, {.step = 0}, states.buffers()),
                 {"step is 0"});
  expect_refused(adam_update({.amsgrad = true}, kStep, states.buffers()),
                 {"amsgrad"});
  EXPECT_EQ(states.contents(), before);
}

TEST(Adam, DoesNothingToNothing) {
  EXPECT_TRUE(adam_update(kOptions, kStep, AdamBuffers{}).ok());
  EXPECT_TRUE(sum_of_squares(Dtype::kFloat32, nullptr, 0, 1, {}).ok());
}

TEST(Adam, FirstStepsMatchTheTextbook) {
  float weight = 1;
  float grad = 0.5;
  float m = 0;
  float v = 0;
  AdamBuffers b = {.count = 1,
                   .grad = &grad,
                   .weight = &weight,
                   .exp_avg = &m,
                   .exp_avg_sq = &v};
  double w = 1;
  for (int t = 1; t <= 3; ++t) {
    ASSERT_TRUE(adam_update(kOptions, {.step = t}, b).ok());
    // With a constant gradient both corrected moments are g and g^2.
    w = w * (1 - 1e-2 * 0.1) - 1e-2 * 0.5 / (0.5 + 1e-8);
    EXPECT_NEAR(weight, w, 1e-6);
  }
}

TEST(Adam, MaximizingIsMinimizingTheNegative) {
  for (WeightDecay decay : kAllDecays) {
    States up(999, Dtype::kFloat32, Format::kFloat32, 5);
    States down(999, Dtype::kFloat32, Format::kFloat32, 5);
    AdamOptions options = kOptions;
    options.decay = decay;
    AdamStep negative = kStep;
    negative.clip = -kStep.clip;
    ASSERT_TRUE(adam_update(options, negative, down.buffers()).ok());
    options.maximize = true;
    ASSERT_TRUE(adam_update(options, kStep, up.buffers()).ok());
    EXPECT_EQ(up.contents(), down.contents());
  }
}

TEST(Adam, L2WithoutDecayIsPlainAdam) {
  States plain(999, Dtype::kFloat32, Format::kFloat32, 5);
  States l2(999, Dtype::kFloat32, Format::kFloat32, 5);
  AdamOptions options = {.weight_decay = 0};
  ASSERT_TRUE(adam_update(options, kStep, plain.buffers()).ok());
  options.decay = WeightDecay::kL2;
  ASSERT_TRUE(adam_update(options, kStep, l2.buffers()).ok());
  EXPECT_EQ(plain.contents(), l2.contents());
}

RC_GTEST_PROP(Adam, SplitAndPlainMastersAreTheSameWeights, ()) {
  auto grad = *rc::gen::elementOf(kAllDtypes);
  auto seed = *rc::gen::arbitrary<std::uint64_t>();
  auto count = *rc::gen::inRange<std::size_t>(1, 3000);
  States plain(count, grad, Format::kBFloat16Master, seed);
  States split(count, grad, Format::kBFloat16Split, seed);
  for (int step = 1; step <= 3; ++step) {
    RC_ASSERT(adam_update(kOptions, {.step = step}, plain.buffers()).ok());
    RC_ASSERT(adam_update(kOptions, {.step = step}, split.buffers()).ok());
  }
  RC_ASSERT(plain.contents().weight16 == split.contents().weight16);
  RC_ASSERT(plain.contents().exp_avg == split.contents().exp_avg);
  std::vector<float> joined(count);
  join_master(split.contents().weight16.data(), split.contents().low.data(),
              joined.data(), count);
  for (std::size_t i = 0; i < count; ++i) {
    RC_ASSERT(std::bit_cast<std::uint32_t>(joined[i]) ==
              plain.contents().master[i]);
  }
}

// With a learning rate of 0 the master keeps its value: ties included, which
// random updates hardly ever meet.
TEST(Adam, SplitAndPlainMastersAgreeOnTies) {
  constexpr std::size_t kCount = 0x10000;
  std::vector<float> master(kCount);
  std::vector<std::uint16_t> weight(kCount), high(kCount), low(kCount);
  std::vector<float> grad(kCount, 1), m(kCount), v(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    master[i] =
        std::bit_cast<float>(static_cast<std::uint32_t>((i << 16) | 0x8000U));
  }
  split_master(master.data(), high.data(), low.data(), kCount);
  AdamBuffers plain = {.count = kCount,
                       .grad = grad.data(),
                       .weight_dtype = Dtype::kBFloat16,
                       .weight = weight.data(),
                       .master = master.data(),
                       .exp_avg = m.data(),
                       .exp_avg_sq = v.data()};
  AdamBuffers split = plain;
  split.weight = high.data();
  split.master = nullptr;
  split.low = low.data();
  ASSERT_TRUE(adam_update({.lr = 0}, {}, plain).ok());
  ASSERT_TRUE(adam_update({.lr = 0}, {}, split).ok());
  EXPECT_EQ(weight, high);
}

RC_GTEST_PROP(Adam, ThreadsAndSplitsChangeNothing, ()) {
  auto grad = *rc::gen::elementOf(kAllDtypes);
  auto format = *rc::gen::elementOf(kAllFormats);
  auto seed = *rc::gen::arbitrary<std::uint64_t>();
  auto count = *rc::gen::inRange<std::size_t>(1, 60'000);
  auto cut = *rc::gen::inRange<std::size_t>(0, count);
  cut -= cut % kSumBlock;
  auto pool = ThreadPool::create(*rc::gen::inRange(1, 5)).value();
  std::size_t remainder = std::min<std::size_t>(count - cut, 7);

  std::vector<double> whole_sums(num_sum_blocks(count));
  States whole(count, grad, format, seed);
  AdamBuffers b = whole.buffers();
  b.block_sums = whole_sums;
  b.remainder = remainder;
  RC_ASSERT(adam_update(kOptions, kStep, b).ok());

  std::vector<double> part_sums(num_sum_blocks(count));
  States parts(count, grad, format, seed);
  for (auto [begin, end] : {std::pair{std::size_t{0}, cut}, {cut, count}}) {
    AdamBuffers part = parts.buffers();
    part.count = end - begin;
    part.grad = static_cast<const std::byte*>(part.grad) +
                begin * dtype_bytes(part.grad_dtype);
    part.weight = static_cast<std::byte*>(part.weight) +
                  begin * dtype_bytes(part.weight_dtype);
    if (part.master != nullptr) part.master += begin;
    if (part.low != nullptr) part.low += begin;
    part.exp_avg += begin;
    part.exp_avg_sq += begin;
    part.remainder = end == count ? remainder : 0;
    part.block_sums = std::span(part_sums).subspan(begin / kSumBlock,
                                                   num_sum_blocks(end - begin));
    RC_ASSERT(adam_update(kOptions, kStep, part, pool.get()).ok());
  }
  RC_ASSERT(parts.contents() == whole.contents());
  auto bits = [](const std::vector<double>& sums) {
    std::vector<std::uint64_t> out;
    for (double sum : sums) {
      out.push_back(std::bit_cast<std::uint64_t>(sum == sum ? sum : 0.5));
    }
    return out;
  };
  RC_ASSERT(bits(part_sums) == bits(whole_sums));
}

TEST(Adam, RemainderElementsFollowTheOtherRounding) {
  States body(64, Dtype::kFloat32, Format::kFloat32, 9);
  States mixed(64, Dtype::kFloat32, Format::kFloat32, 9);
  States reference(64, Dtype::kFloat32, Format::kFloat32, 9);
  AdamBuffers b = mixed.buffers();
  b.remainder = 24;
  ASSERT_TRUE(adam_update(kOptions, kStep, b).ok());
  ASSERT_TRUE(adam_update(kOptions, kStep, body.buffers()).ok());
  reference_update({Dtype::kFloat32, Format::kFloat32, WeightDecay::kDecoupled,
                    Rounding::kRemainder},
                   reference.args(adam_scalars(kOptions, kStep)));
  EXPECT_NE(body.contents().exp_avg_sq, mixed.contents().exp_avg_sq);
  for (std::size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(mixed.contents().exp_avg_sq[i],
              (i < 40 ? body : reference).contents().exp_avg_sq[i]);
  }
}

TEST(Adam, SumsAreOfTheUnscaledUnclippedGradient) {
  constexpr std::size_t kCount = 3 * kSumBlock + 5;
  std::vector<float> grad(kCount, 3), w(kCount), m(kCount), v(kCount);
  std::vector<double> sums(num_sum_blocks(kCount));
  AdamBuffers b = {.count = kCount,
                   .grad = grad.data(),
                   .weight = w.data(),
                   .exp_avg = m.data(),
                   .exp_avg_sq = v.data(),
                   .block_sums = sums};
  ASSERT_TRUE(
      adam_update(kOptions, {.inverse_scale = 2, .clip = 0.01F}, b).ok());
  EXPECT_EQ(total(sums), 36.0 * kCount);
  EXPECT_EQ(sums.back(), 36.0 * 5);

  std::vector<double> alone(sums.size());
  auto pool = ThreadPool::create(2).value();
  ASSERT_TRUE(
      sum_of_squares(Dtype::kFloat32, grad.data(), kCount, 2, alone, pool.get())
          .ok());
  EXPECT_EQ(alone, sums);
  expect_refused(sum_of_squares(Dtype::kFloat32, grad.data(), kCount, 2,
                                std::span(alone).first(1)),
                 {"block_sums has 1"});
  expect_refused(sum_of_squares(Dtype::kFloat32, nullptr, kCount, 2, alone),
                 {"null"});
}

TEST(Adam, CallersFloatModeIsSetAsideAndKept) {
  States plain(500, Dtype::kFloat32, Format::kFloat32, 4);
  States odd(500, Dtype::kFloat32, Format::kFloat32, 4);
  ASSERT_TRUE(adam_update(kOptions, kStep, plain.buffers()).ok());
  std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040U);  // flush to zero, subnormals are zero
#endif
  ASSERT_TRUE(adam_update(kOptions, kStep, odd.buffers()).ok());
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
#if defined(__x86_64__)
  EXPECT_EQ(_mm_getcsr() & 0x8040U, 0x8040U);
#endif
  std::fesetenv(FE_DFL_ENV);
  EXPECT_EQ(odd.contents(), plain.contents());
}

}  // namespace
}  // namespace zinf
