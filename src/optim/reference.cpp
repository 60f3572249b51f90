#include "src/optim/reference.h"

#include <array>

namespace zinf {
namespace {

using ElementFn = AdamElement (*)(AdamElement, float, const AdamScalars&);

template <WeightDecay kDecay, Lerp kLerp>
ElementFn by_rounding(Rounding rounding) {
  if (rounding == Rounding::kBody) {
    return [](AdamElement old, float grad, const AdamScalars& scalars) {
      return adam_element<kDecay, kLerp, Rounding::kBody>(old, grad, scalars);
    };
  }
  return [](AdamElement old, float grad, const AdamScalars& scalars) {
    return adam_element<kDecay, kLerp, Rounding::kRemainder>(old, grad,
                                                             scalars);
  };
}

template <WeightDecay kDecay>
ElementFn by_lerp(Lerp lerp, Rounding rounding) {
  return lerp == Lerp::kFromGrad
             ? by_rounding<kDecay, Lerp::kFromGrad>(rounding)
             : by_rounding<kDecay, Lerp::kFromAverage>(rounding);
}

ElementFn element_fn(const ReferenceKind& kind, Lerp lerp) {
  return kind.decay == WeightDecay::kL2
             ? by_lerp<WeightDecay::kL2>(lerp, kind.rounding)
             : by_lerp<WeightDecay::kDecoupled>(lerp, kind.rounding);
}

float load_weight(Format format, const UpdateArgs& args, std::size_t i) {
  if (format == Format::kFloat32) return static_cast<float*>(args.weight)[i];
  if (format == Format::kBFloat16Split) {
    return join_float(static_cast<std::uint16_t*>(args.weight)[i], args.low[i]);
  }
  return args.master[i];
}

void store_weight(float weight, Format format, const UpdateArgs& args,
                  std::size_t i) {
  switch (format) {
    case Format::kFloat32:
      reference_narrow(weight, Dtype::kFloat32, args.weight, i);
      break;
    case Format::kBFloat16Master:
      args.master[i] = weight;
      reference_narrow(weight, Dtype::kBFloat16, args.weight, i);
      break;
    case Format::kFloat16Master:
      args.master[i] = weight;
      reference_narrow(weight, Dtype::kFloat16, args.weight, i);
      break;
    case Format::kBFloat16Split:
      args.low[i] = canonical_to_low(weight);
      reference_narrow(weight, Dtype::kBFloat16, args.weight, i);
      break;
  }
}

}  // namespace

float reference_widen(Dtype dtype, const void* from, std::size_t i) {
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(from)[i];
  std::uint16_t half = static_cast<const std::uint16_t*>(from)[i];
  return dtype == Dtype::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half);
}

void reference_narrow(float x, Dtype dtype, void* to, std::size_t i) {
  if (dtype == Dtype::kFloat32) {
    static_cast<float*>(to)[i] = x;
  } else {
    static_cast<std::uint16_t*>(to)[i] =
        dtype == Dtype::kBFloat16 ? float_to_bf16(x) : float_to_fp16(x);
  }
}

void reference_update(const ReferenceKind& kind, const UpdateArgs& args) {
  ElementFn update = element_fn(kind, args.scalars->lerp);
  for (std::size_t i = 0; i < args.count; ++i) {
    AdamElement old = {load_weight(kind.format, args, i), args.exp_avg[i],
                       args.exp_avg_sq[i]};
    AdamElement next = update(
        old, reference_widen(kind.grad_dtype, args.grad, i), *args.scalars);
    args.exp_avg[i] = next.exp_avg;
    args.exp_avg_sq[i] = next.exp_avg_sq;
    store_weight(next.weight, kind.format, args, i);
  }
}

double reference_sum(Dtype dtype, const void* grad, std::size_t count,
                     float inverse_scale) {
  std::array<double, kSumLanes> lanes = {};
  for (std::size_t i = 0; i < count; ++i) {
    lanes[i % kSumLanes] +=
        square(reference_widen(dtype, grad, i), inverse_scale);
  }
  for (std::size_t half = kSumLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

}  // namespace zinf
