// The arithmetic of src/optim for one element. This is the definition: the
// kernels are loops over these functions, and the tests hold every kernel to
// them.
//
// Compile what includes this with -ffp-contract=off: where a multiply and an
// add are fused is part of the definition.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "zinf/adam.h"
#include "zinf/dtype.h"

// Inlined always, so that a function for another instruction set contains them.
#define ZINF_INLINE inline __attribute__((always_inline))

namespace zinf {

inline constexpr std::uint32_t kCanonicalNan = 0x7FC00000;

// a < b for numbers below 2^31: vector units before AVX-512 compare signed
// integers only.
ZINF_INLINE bool less(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b);
}

// `condition ? yes : no` as bit operations: g++ turns nested ternaries into
// branches, and then does not vectorise the loop around them.
ZINF_INLINE std::uint32_t select(bool condition, std::uint32_t yes,
                                 std::uint32_t no) {
  std::uint32_t mask = 0U - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// Which of two NaNs an operation passes on depends on the operand order that
// the compiler chose; one NaN for all makes results independent of it.
ZINF_INLINE float canonical(float x) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return std::bit_cast<float>(select(x != x, kCanonicalNan, bits));
}

ZINF_INLINE float bf16_to_float(std::uint16_t half) {
  return std::bit_cast<float>(std::uint32_t{half} << 16);
}

// REQUIRES canonical(x): the carry would turn the NaN 0x7FFFFFFF into -0.
ZINF_INLINE std::uint16_t canonical_to_bf16(float x) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
}

ZINF_INLINE std::uint16_t float_to_bf16(float x) {
  return canonical_to_bf16(canonical(x));
}

// The lower half that goes with canonical_to_bf16(x).
ZINF_INLINE std::uint16_t canonical_to_low(float x) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x));
}

ZINF_INLINE float join_float(std::uint16_t high, std::uint16_t low) {
  auto residual = static_cast<std::int32_t>(static_cast<std::int16_t>(low));
  return std::bit_cast<float>((std::uint32_t{high} << 16) +
                              static_cast<std::uint32_t>(residual));
}

// All cases are computed and one is selected: compilers vectorise that, while
// _Float16 stays scalar with g++ 12.
ZINF_INLINE float fp16_to_float(std::uint16_t half) {
  constexpr std::uint32_t kExponent = 0x7C00U << 13;
  constexpr std::uint32_t kRebias = (127U - 15U) << 23;
  std::uint32_t magnitude = (half & 0x7FFFU) << 13;
  std::uint32_t exponent = magnitude & kExponent;
  std::uint32_t normal = magnitude + kRebias;
  // A subnormal is its mantissa times 2^-24: give it the exponent of 2^-14 and
  // take 2^-14 away again.
  std::uint32_t subnormal = std::bit_cast<std::uint32_t>(
      std::bit_cast<float>(normal + (1U << 23)) - 0x1p-14F);
  std::uint32_t bits = select(exponent == 0, subnormal, normal);
  bits = select(exponent == kExponent, 0x7F800000U, bits);
  bits |= (half & 0x8000U) << 16;
  return std::bit_cast<float>(
      select(less(kExponent, magnitude), kCanonicalNan, bits));
}

ZINF_INLINE std::uint16_t float_to_fp16(float x) {
  constexpr std::uint32_t kOverflow = (127U + 16U) << 23;  // 2^16
  constexpr std::uint32_t kSmallestNormal = (127U - 14U) << 23;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  // Rounds to even: adds half of the last place, minus one if it is even.
  std::uint32_t odd = (magnitude >> 13) & 1U;
  std::uint32_t normal =
      (magnitude - ((127U - 15U) << 23) + 0xFFFU + odd) >> 13;
  // Adding 0.5 leaves exactly the bits of a subnormal, rounded by the addition.
  std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) -
      std::bit_cast<std::uint32_t>(0.5F);
  std::uint32_t half =
      select(less(magnitude, kSmallestNormal), subnormal, normal);
  half = select(less(magnitude, kOverflow), half, 0x7C00U);
  half |= (bits >> 16) & 0x8000U;
  return static_cast<std::uint16_t>(select(x != x, 0x7E00U, half));
}

// Where torch's lerp starts: it goes the shorter way, beta1 <= 0.5 from the
// gradient.
enum class Lerp : std::uint8_t { kFromAverage, kFromGrad };

// The step's numbers, computed in double and rounded to float once.
struct AdamScalars {
  float inverse_scale;
  float clip;  // negative to maximize: exact, and costs nothing
  float decay;
  float l2;
  float lerp_weight;
  Lerp lerp;
  float beta2;
  float one_minus_beta2;
  float sqrt_correction2;
  float eps;
  float minus_step_size;
};

struct AdamElement {
  float weight;
  float exp_avg;
  float exp_avg_sq;
};

// How exp_avg_sq is rounded: as torch's vector loop or as its remainder loop.
enum class Rounding : std::uint8_t { kBody, kRemainder };

template <WeightDecay kDecay, Lerp kLerp, Rounding kRounding = Rounding::kBody>
ZINF_INLINE AdamElement adam_element(AdamElement old, float grad,
                                     const AdamScalars& s) {
  float g = grad * s.inverse_scale * s.clip;
  float weight = old.weight;
  if constexpr (kDecay == WeightDecay::kL2) {
    g = std::fma(weight, s.l2, g);
  } else {
    weight = weight * s.decay;
  }
  float lerp_base = kLerp == Lerp::kFromGrad ? g : old.exp_avg;
  float exp_avg = std::fma(s.lerp_weight, g - old.exp_avg, lerp_base);
  float scaled = s.one_minus_beta2 * g;
  float exp_avg_sq = kRounding == Rounding::kBody
                         ? std::fma(scaled, g, old.exp_avg_sq * s.beta2)
                         : std::fma(old.exp_avg_sq, s.beta2, scaled * g);
  float denominator = std::sqrt(exp_avg_sq) / s.sqrt_correction2 + s.eps;
  weight = weight + s.minus_step_size * exp_avg / denominator;
  return {canonical(weight), canonical(exp_avg), canonical(exp_avg_sq)};
}

// Squares of floats are exact in double: fused or not is the same here.
ZINF_INLINE double square(float grad, float inverse_scale) {
  double unscaled = grad * inverse_scale;
  return unscaled * unscaled;
}

// A block's squares go round-robin into so many sums, which are then added as a
// balanced tree: the order of a 512-bit vector unit, on every CPU.
inline constexpr std::size_t kSumLanes = 16;

}  // namespace zinf
