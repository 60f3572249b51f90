// adam_update() and sum_of_squares() with a chosen instruction set, for tests
// and benchmarks. REQUIRES isa_supported(isa).
#pragma once

#include "src/optim/kernels.h"
#include "zinf/adam.h"

namespace zinf {

AdamScalars adam_scalars(const AdamOptions& options, const AdamStep& step);

Status adam_update_with(Isa isa, const AdamOptions& options,
                        const AdamStep& step, const AdamBuffers& buffers,
                        ThreadPool* pool);

Status sum_of_squares_with(Isa isa, Dtype dtype, const void* grad,
                           std::size_t count, float inverse_scale,
                           std::span<double> block_sums, ThreadPool* pool);

}  // namespace zinf
