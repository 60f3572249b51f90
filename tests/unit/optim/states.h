// Buffers of one Adam update with nasty contents, for the tests of src/optim.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "src/optim/kernels.h"
#include "src/optim/reference.h"
#include "zinf/adam.h"

namespace zinf {

inline constexpr std::array<Dtype, 3> kAllDtypes = {
    Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16};
inline constexpr std::array<Format, 4> kAllFormats = {
    Format::kFloat32, Format::kBFloat16Master, Format::kFloat16Master,
    Format::kBFloat16Split};
inline constexpr std::array<WeightDecay, 2> kAllDecays = {
    WeightDecay::kDecoupled, WeightDecay::kL2};

inline Dtype weight_dtype(Format format) {
  switch (format) {
    case Format::kFloat32:
      return Dtype::kFloat32;
    case Format::kFloat16Master:
      return Dtype::kFloat16;
    case Format::kBFloat16Master:
    case Format::kBFloat16Split:
      return Dtype::kBFloat16;
  }
  return Dtype::kFloat32;
}

// Plausible numbers, and every fourth time any bit pattern or a special one.
inline float nasty_float(std::mt19937_64& random) {
  constexpr std::array<std::uint32_t, 14> kSpecial = {
      0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000,
      0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
      0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0x3F808000};
  std::uint64_t word = random();
  auto bits = static_cast<std::uint32_t>(word >> 32);
  switch (word % 16) {
    case 0:
    case 1:
      return std::bit_cast<float>(bits);
    case 2:
      return std::bit_cast<float>(bits & 0x807FFFFFU);  // subnormal
    case 3:
      return std::bit_cast<float>(kSpecial[bits % kSpecial.size()]);
    default:
      return std::bit_cast<float>((bits & 0x83FFFFFFU) | 0x3C000000U);
  }
}

// Elements start `misaligned` elements after a 64-byte bound.
template <typename T>
class Elements {
 public:
  Elements(std::size_t count, std::size_t misaligned)
      : memory_(count + misaligned + 64 / sizeof(T)), count_(count) {
    auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    offset_ = (64 - address % 64) % 64 / sizeof(T) + misaligned;
  }

  T* data() { return memory_.data() + offset_; }
  T& operator[](std::size_t i) { return data()[i]; }

  // The bits, so that NaN equals itself.
  std::vector<T> copy() { return std::vector<T>(data(), data() + count_); }

 private:
  std::vector<T> memory_;
  std::size_t count_;
  std::size_t offset_;
};

class States {
 public:
  struct Contents {
    std::vector<std::uint32_t> weight32, master, exp_avg, exp_avg_sq;
    std::vector<std::uint16_t> weight16, low;
    bool operator==(const Contents&) const = default;
  };

  States(std::size_t count, Dtype grad_dtype, Format format, std::uint64_t seed,
         std::size_t misaligned = 0)
      : count_(count),
        grad_dtype_(grad_dtype),
        format_(format),
        grad32_(count, misaligned),
        weight32_(count, misaligned),
        master_(count, misaligned),
        exp_avg_(count, misaligned),
        exp_avg_sq_(count, misaligned),
        grad16_(count, misaligned),
        weight16_(count, misaligned),
        low_(count, misaligned) {
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i < count; ++i) {
      float grad = nasty_float(random);
      grad32_[i] = std::bit_cast<std::uint32_t>(grad);
      grad16_[i] = static_cast<std::uint16_t>(random());
      if (i % 2 == 0 && grad_dtype != Dtype::kFloat32) {
        reference_narrow(grad, grad_dtype, grad16_.data(), i);
      }
      float weight = canonical(nasty_float(random));
      weight32_[i] = master_[i] = std::bit_cast<std::uint32_t>(weight);
      low_[i] = canonical_to_low(weight);
      if (format != Format::kFloat32) {
        reference_narrow(weight, weight_dtype(format), weight16_.data(), i);
      }
      exp_avg_[i] = std::bit_cast<std::uint32_t>(nasty_float(random));
      // Mostly positive, as it is in life.
      exp_avg_sq_[i] = std::bit_cast<std::uint32_t>(nasty_float(random)) &
                       (random() % 8 == 0 ? ~0U : 0x7FFFFFFFU);
    }
  }

  AdamBuffers buffers() {
    AdamBuffers b;
    b.count = count_;
    b.grad_dtype = grad_dtype_;
    b.grad = grad_dtype_ == Dtype::kFloat32
                 ? static_cast<const void*>(grad32_.data())
                 : grad16_.data();
    b.weight_dtype = weight_dtype(format_);
    b.weight = format_ == Format::kFloat32
                   ? static_cast<void*>(weight32_.data())
                   : weight16_.data();
    if (format_ == Format::kBFloat16Split) {
      b.low = low_.data();
    } else if (format_ != Format::kFloat32) {
      b.master = reinterpret_cast<float*>(master_.data());
    }
    b.exp_avg = reinterpret_cast<float*>(exp_avg_.data());
    b.exp_avg_sq = reinterpret_cast<float*>(exp_avg_sq_.data());
    return b;
  }

  UpdateArgs args(const AdamScalars& scalars) {
    AdamBuffers b = buffers();
    return {b.grad,    b.weight,     b.master, b.low,
            b.exp_avg, b.exp_avg_sq, b.count,  &scalars};
  }

  Contents contents() {
    return {weight32_.copy(),   master_.copy(),   exp_avg_.copy(),
            exp_avg_sq_.copy(), weight16_.copy(), low_.copy()};
  }

 private:
  std::size_t count_;
  Dtype grad_dtype_;
  Format format_;
  Elements<std::uint32_t> grad32_, weight32_, master_, exp_avg_, exp_avg_sq_;
  Elements<std::uint16_t> grad16_, weight16_, low_;
};

}  // namespace zinf
