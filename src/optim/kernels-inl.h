// The loops for one instruction set. Included several times by kernels.cpp,
// each time in another namespace with another ZINF_TARGET; no include guard on
// purpose.

template <Dtype kGrad>
ZINF_INLINE float load_grad(const void* grad, std::size_t i) {
  if constexpr (kGrad == Dtype::kFloat32) {
    return static_cast<const float*>(grad)[i];
  } else if constexpr (kGrad == Dtype::kBFloat16) {
    return bf16_to_float(static_cast<const std::uint16_t*>(grad)[i]);
  } else {
    return fp16_to_float(static_cast<const std::uint16_t*>(grad)[i]);
  }
}

// The pointers are parameters because compilers trust __restrict only there.
template <Dtype kGrad, Format kFormat, WeightDecay kDecay, Lerp kLerp>
ZINF_TARGET void update_loop(const void* __restrict grad,
                             void* __restrict weight, float* __restrict master,
                             std::uint16_t* __restrict low,
                             float* __restrict exp_avg,
                             float* __restrict exp_avg_sq, std::size_t count,
                             const AdamScalars s) {
  auto* weight32 = static_cast<float*>(weight);
  auto* weight16 = static_cast<std::uint16_t*>(weight);
  for (std::size_t i = 0; i < count; ++i) {
    float old = 0;
    if constexpr (kFormat == Format::kFloat32) {
      old = weight32[i];
    } else if constexpr (kFormat == Format::kBFloat16Split) {
      old = join_float(weight16[i], low[i]);
    } else {
      old = master[i];
    }
    AdamElement next = adam_element<kDecay, kLerp>(
        {old, exp_avg[i], exp_avg_sq[i]}, load_grad<kGrad>(grad, i), s);
    exp_avg[i] = next.exp_avg;
    exp_avg_sq[i] = next.exp_avg_sq;
    if constexpr (kFormat == Format::kFloat32) {
      weight32[i] = next.weight;
    } else if constexpr (kFormat == Format::kBFloat16Split) {
      weight16[i] = canonical_to_bf16(next.weight);
      low[i] = canonical_to_low(next.weight);
    } else {
      master[i] = next.weight;
      weight16[i] = kFormat == Format::kBFloat16Master
                        ? canonical_to_bf16(next.weight)
                        : float_to_fp16(next.weight);
    }
  }
}

template <Dtype kGrad, Format kFormat, WeightDecay kDecay>
void update(const UpdateArgs& a) {
  auto* loop = a.scalars->lerp == Lerp::kFromGrad
                   ? update_loop<kGrad, kFormat, kDecay, Lerp::kFromGrad>
                   : update_loop<kGrad, kFormat, kDecay, Lerp::kFromAverage>;
  loop(a.grad, a.weight, a.master, a.low, a.exp_avg, a.exp_avg_sq, a.count,
       *a.scalars);
}

template <Dtype kGrad>
ZINF_TARGET double sum(const void* grad, std::size_t count,
                       float inverse_scale) {
  double lanes[kSumLanes] = {};
  std::size_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    for (std::size_t lane = 0; lane < kSumLanes; ++lane) {
      lanes[lane] += square(load_grad<kGrad>(grad, i + lane), inverse_scale);
    }
  }
  for (std::size_t lane = 0; i + lane < count; ++lane) {
    lanes[lane] += square(load_grad<kGrad>(grad, i + lane), inverse_scale);
  }
  for (std::size_t half = kSumLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

ZINF_TARGET void narrow_bf16(const float* __restrict from,
                             std::uint16_t* __restrict to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = float_to_bf16(from[i]);
}

ZINF_TARGET void narrow_fp16(const float* __restrict from,
                             std::uint16_t* __restrict to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = float_to_fp16(from[i]);
}

ZINF_TARGET void widen_bf16(const std::uint16_t* __restrict from,
                            float* __restrict to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = bf16_to_float(from[i]);
}

ZINF_TARGET void widen_fp16(const std::uint16_t* __restrict from,
                            float* __restrict to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = fp16_to_float(from[i]);
}

ZINF_TARGET void split(const float* __restrict master,
                       std::uint16_t* __restrict high,
                       std::uint16_t* __restrict low, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    float x = canonical(master[i]);
    high[i] = canonical_to_bf16(x);
    low[i] = canonical_to_low(x);
  }
}

ZINF_TARGET void join(const std::uint16_t* __restrict high,
                      const std::uint16_t* __restrict low,
                      float* __restrict master, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    master[i] = join_float(high[i], low[i]);
  }
}

template <Dtype kGrad, Format kFormat>
constexpr std::array<Kernels::Update, 2> update_by_decay() {
  return {update<kGrad, kFormat, WeightDecay::kDecoupled>,
          update<kGrad, kFormat, WeightDecay::kL2>};
}

template <Dtype kGrad>
constexpr std::array<std::array<Kernels::Update, 2>, 4> update_by_format() {
  return {update_by_decay<kGrad, Format::kFloat32>(),
          update_by_decay<kGrad, Format::kBFloat16Master>(),
          update_by_decay<kGrad, Format::kFloat16Master>(),
          update_by_decay<kGrad, Format::kBFloat16Split>()};
}

constexpr Kernels kTable = {
    .update = {update_by_format<Dtype::kFloat32>(),
               update_by_format<Dtype::kBFloat16>(),
               update_by_format<Dtype::kFloat16>()},
    .sum = {sum<Dtype::kFloat32>, sum<Dtype::kBFloat16>, sum<Dtype::kFloat16>},
    .float_to_bf16 = narrow_bf16,
    .float_to_fp16 = narrow_fp16,
    .bf16_to_float = widen_bf16,
    .fp16_to_float = widen_fp16,
    .split = split,
    .join = join,
};
