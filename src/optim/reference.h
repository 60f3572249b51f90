// The definition of src/optim/element.h applied to buffers one element at a
// time, with no regard for speed: what the kernels are tested against, and the
// way of torch's remainder elements, which are at most 15 in a tensor.
#pragma once

#include <cstddef>

#include "src/optim/kernels.h"

namespace zinf {

struct ReferenceKind {
  Dtype grad_dtype;
  Format format;
  WeightDecay decay;
  Rounding rounding = Rounding::kBody;
};

void reference_update(const ReferenceKind& kind, const UpdateArgs& args);

double reference_sum(Dtype dtype, const void* grad, std::size_t count,
                     float inverse_scale);

float reference_widen(Dtype dtype, const void* from, std::size_t i);
void reference_narrow(float x, Dtype dtype, void* to, std::size_t i);

}  // namespace zinf
