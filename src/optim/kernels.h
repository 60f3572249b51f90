// The loops of src/optim, compiled once per instruction set, and their choice.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "src/optim/element.h"
#include "zinf/dtype.h"

namespace zinf {

// Where the fp32 master of a weight is.
enum class Format : std::uint8_t {
  kFloat32,         // the weight itself
  kBFloat16Master,  // beside a bf16 weight
  kFloat16Master,   // beside an fp16 weight
  kBFloat16Split,   // a bf16 weight and its low half
};

// Pointers to the first of `count` elements; what the format lacks is null.
struct UpdateArgs {
  const void* grad;
  void* weight;
  float* master;
  std::uint16_t* low;
  float* exp_avg;
  float* exp_avg_sq;
  std::size_t count;
  const AdamScalars* scalars;
};

struct Kernels {
  using Update = void (*)(const UpdateArgs& args);
  using Sum = double (*)(const void* grad, std::size_t count,
                         float inverse_scale);
  using Narrow = void (*)(const float* from, std::uint16_t* to,
                          std::size_t count);
  using Widen = void (*)(const std::uint16_t* from, float* to,
                         std::size_t count);

  // By gradient type, format, and decay.
  std::array<std::array<std::array<Update, 2>, 4>, 3> update;
  std::array<Sum, 3> sum;  // of at most kSumBlock elements, by gradient type
  Narrow float_to_bf16;
  Narrow float_to_fp16;
  Widen bf16_to_float;
  Widen fp16_to_float;
  void (*split)(const float* master, std::uint16_t* high, std::uint16_t* low,
                std::size_t count);
  void (*join)(const std::uint16_t* high, const std::uint16_t* low,
               float* master, std::size_t count);
};

enum class Isa : std::uint8_t { kBaseline, kAvx2, kAvx512 };

inline constexpr std::array<Isa, 3> kAllIsas = {Isa::kBaseline, Isa::kAvx2,
                                                Isa::kAvx512};

const char* isa_name(Isa isa);

// Whether this build has the loops and this CPU the instructions.
bool isa_supported(Isa isa);
Isa best_isa();

// REQUIRES isa_supported(isa).
const Kernels& kernels(Isa isa);

template <typename E>
constexpr std::size_t index(E enumerator) {
  return static_cast<std::size_t>(enumerator);
}

}  // namespace zinf
