// Every kernel that this CPU runs, held to the scalar definition bit by bit.
#include "src/optim/kernels.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <ostream>
#include <string>

#include "src/optim/adam_with.h"
#include "src/optim/reference.h"
#include "tests/unit/optim/states.h"

namespace zinf {

void PrintTo(Isa isa, std::ostream* out) { *out << isa_name(isa); }

namespace {

std::string case_name(const testing::TestParamInfo<Isa>& info) {
  return isa_name(info.param);
}

class KernelsTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!isa_supported(GetParam())) {
      GTEST_SKIP() << "this CPU has no " << isa_name(GetParam());
    }
  }

  // Two steps, so that a wrong state would also show in the weight.
  static void expect_equal(Isa isa, const ReferenceKind& kind,
                           const AdamScalars& scalars, std::size_t count,
                           std::size_t misaligned) {
    std::uint64_t seed = count * 31 + misaligned;
    States ours(count, kind.grad_dtype, kind.format, seed, misaligned);
    States theirs(count, kind.grad_dtype, kind.format, seed);
    Kernels::Update update =
        kernels(isa).update[index(kind.grad_dtype)][index(kind.format)]
                           [index(kind.decay)];
    for (int step = 0; step < 2; ++step) {
      update(ours.args(scalars));
      reference_update(kind, theirs.args(scalars));
      ASSERT_EQ(ours.contents(), theirs.contents())
          << isa_name(isa) << ", gradient " << dtype_name(kind.grad_dtype)
          << ", format " << index(kind.format) << ", decay "
          << index(kind.decay) << ", " << count << " elements, " << misaligned
          << " misaligned, step " << step;
    }
  }
};

TEST_P(KernelsTest, UpdateEqualsTheDefinition) {
  for (Dtype grad : kAllDtypes) {
    for (Format format : kAllFormats) {
      for (WeightDecay decay : kAllDecays) {
        for (double beta1 : {0.9, 0.3}) {
          AdamScalars scalars = adam_scalars(
              {.beta1 = beta1, .weight_decay = 0.1, .decay = decay},
              {.step = 3, .inverse_scale = 0.125F, .clip = 0.7F});
          for (std::size_t count = 0; count < 70; ++count) {
            expect_equal(GetParam(), {grad, format, decay}, scalars, count,
                         count % 5);
          }
          expect_equal(GetParam(), {grad, format, decay}, scalars, 4999, 3);
        }
      }
    }
  }
}

TEST_P(KernelsTest, SumEqualsTheDefinition) {
  for (Dtype dtype : kAllDtypes) {
    for (std::size_t count : {0, 1, 15, 16, 17, 63, 1000, 4095, 4096}) {
      for (std::size_t misaligned : {0, 1, 7}) {
        States states(count, dtype, Format::kFloat32, count, misaligned);
        const void* grad = states.buffers().grad;
        double ours = kernels(GetParam()).sum[index(dtype)](grad, count, 0.3F);
        double theirs = reference_sum(dtype, grad, count, 0.3F);
        bool both_nan = ours != ours && theirs != theirs;
        EXPECT_TRUE(both_nan || ours == theirs) << ours << " " << theirs;
      }
    }
  }
}

TEST_P(KernelsTest, SumOfFiniteGradientsEqualsTheDefinition) {
  std::vector<float> grad(4096);
  std::mt19937_64 random(1);
  for (float& g : grad) g = std::ldexp(static_cast<float>(random() % 997), -20);
  grad[17] = 3e38F;
  grad[18] = 1e-45F;
  for (std::size_t count : {19, 1000, 4095, 4096}) {
    double ours =
        kernels(GetParam()).sum[index(Dtype::kFloat32)](grad.data(), count, 1);
    EXPECT_EQ(ours, reference_sum(Dtype::kFloat32, grad.data(), count, 1));
    EXPECT_TRUE(std::isfinite(ours));
  }
}

TEST_P(KernelsTest, CastsEqualTheDefinition) {
  const Kernels& table = kernels(GetParam());
  constexpr std::size_t kCount = 100'003;
  std::mt19937_64 random(7);
  std::vector<float> from(kCount);
  for (float& x : from) x = nasty_float(random);
  std::vector<std::uint16_t> bf16(kCount), fp16(kCount), high(kCount),
      low(kCount);
  std::vector<float> joined(kCount), from_bf16(kCount), from_fp16(kCount);
  table.float_to_bf16(from.data(), bf16.data(), kCount);
  table.float_to_fp16(from.data(), fp16.data(), kCount);
  table.split(from.data(), high.data(), low.data(), kCount);
  table.join(high.data(), low.data(), joined.data(), kCount);
  table.bf16_to_float(bf16.data(), from_bf16.data(), kCount);
  table.fp16_to_float(fp16.data(), from_fp16.data(), kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(bf16[i], float_to_bf16(from[i]));
    ASSERT_EQ(fp16[i], float_to_fp16(from[i]));
    ASSERT_EQ(high[i], bf16[i]);
    auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
    ASSERT_EQ(bits(joined[i]), bits(canonical(from[i])));
    ASSERT_EQ(bits(from_bf16[i]), bits(bf16_to_float(bf16[i])));
    ASSERT_EQ(bits(from_fp16[i]), bits(fp16_to_float(fp16[i])));
  }
}

INSTANTIATE_TEST_SUITE_P(All, KernelsTest, testing::ValuesIn(kAllIsas),
                         case_name);

// The number was the same for g++ 12 and clang 19 on x86-64 and g++ 12 on
// aarch64. It changes when the definition or the test's data change, and never
// otherwise.
TEST(Kernels, DefinitionGivesTheSameBitsOnEveryPlatform) {
  std::uint64_t hash = 1469598103934665603ULL;
  auto mix = [&hash](const auto& values) {
    for (auto value : values) hash = (hash ^ value) * 1099511628211ULL;
  };
  for (Dtype grad : kAllDtypes) {
    for (Format format : kAllFormats) {
      for (WeightDecay decay : kAllDecays) {
        States states(1001, grad, format, 1);
        AdamScalars scalars =
            adam_scalars({.weight_decay = 0.1, .decay = decay},
                         {.step = 3, .inverse_scale = 0.125F, .clip = 0.7F});
        reference_update({grad, format, decay}, states.args(scalars));
        States::Contents c = states.contents();
        for (const auto* wide :
             {&c.weight32, &c.master, &c.exp_avg, &c.exp_avg_sq}) {
          mix(*wide);
        }
        mix(c.weight16);
        mix(c.low);
      }
    }
  }
  EXPECT_EQ(hash, 8146540939378461823ULL);
}

RC_GTEST_PROP(Kernels, EveryInstructionSetGivesTheSameBits, ()) {
  auto grad = *rc::gen::elementOf(kAllDtypes);
  auto format = *rc::gen::elementOf(kAllFormats);
  auto decay = *rc::gen::elementOf(kAllDecays);
  auto count = *rc::gen::inRange<std::size_t>(0, 600);
  auto misaligned = *rc::gen::inRange<std::size_t>(0, 16);
  auto seed = *rc::gen::arbitrary<std::uint64_t>();
  // Scalars that no options would give must not break the equality either.
  std::mt19937_64 random(seed);
  AdamScalars scalars = {};
  for (float* scalar :
       {&scalars.inverse_scale, &scalars.clip, &scalars.decay, &scalars.l2,
        &scalars.lerp_weight, &scalars.beta2, &scalars.one_minus_beta2,
        &scalars.sqrt_correction2, &scalars.eps, &scalars.minus_step_size}) {
    *scalar = nasty_float(random);
  }
  scalars.lerp = *rc::gen::element(Lerp::kFromAverage, Lerp::kFromGrad);
  States reference(count, grad, format, seed);
  reference_update({grad, format, decay}, reference.args(scalars));
  for (Isa isa : kAllIsas) {
    if (!isa_supported(isa)) continue;
    States ours(count, grad, format, seed, misaligned);
    kernels(isa).update[index(grad)][index(format)][index(decay)](
        ours.args(scalars));
    RC_ASSERT(ours.contents() == reference.contents());
  }
}

}  // namespace
}  // namespace zinf
