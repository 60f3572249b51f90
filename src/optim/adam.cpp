#include "zinf/adam.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "src/base/align.h"
#include "src/base/cpu_time.h"
#include "src/base/strf.h"
#include "src/optim/adam_with.h"
#include "src/optim/kernels.h"
#include "src/optim/reference.h"
#include "src/optim/run.h"

namespace zinf {
namespace {

struct {
  std::atomic<std::uint64_t> elements = 0;
  std::atomic<std::uint64_t> cpu_ns = 0;
} usage;

Format format_of(const AdamBuffers& buffers) {
  if (buffers.weight_dtype == Dtype::kFloat32) return Format::kFloat32;
  if (buffers.weight_dtype == Dtype::kFloat16) return Format::kFloat16Master;
  return buffers.low != nullptr ? Format::kBFloat16Split
                                : Format::kBFloat16Master;
}

const void* at(const void* base, Dtype dtype, std::size_t i) {
  return static_cast<const std::byte*>(base) + i * dtype_bytes(dtype);
}

void* at(void* base, Dtype dtype, std::size_t i) {
  return static_cast<std::byte*>(base) + i * dtype_bytes(dtype);
}

// Without a decay there is nothing to add to the gradient: adding weight * 0
// would turn -0 into 0 and make NaN of infinite weights, where torch does not.
WeightDecay decay_of(const AdamOptions& options) {
  return options.weight_decay == 0 ? WeightDecay::kDecoupled : options.decay;
}

// One update bound to its buffers.
class Update {
 public:
  Update(Isa isa, const AdamOptions& options, const AdamStep& step,
         const AdamBuffers& buffers)
      : buffers_(buffers),
        scalars_(adam_scalars(options, step)),
        kind_{buffers.grad_dtype, format_of(buffers), decay_of(options),
              Rounding::kRemainder},
        kernels_(kernels(isa)) {}

  void run(std::size_t begin, std::size_t end) const {
    if (buffers_.block_sums.empty()) {
      update(begin, end);
      return;
    }
    // The sum leaves the block's gradient in the cache for the update.
    for (std::size_t i = begin; i < end; i += kSumBlock) {
      std::size_t block_end = std::min(end, i + kSumBlock);
      buffers_.block_sums[i / kSumBlock] =
          kernels_.sum[index(kind_.grad_dtype)](
              at(buffers_.grad, kind_.grad_dtype, i), block_end - i,
              scalars_.inverse_scale);
      update(i, block_end);
    }
  }

 private:
  void update(std::size_t begin, std::size_t end) const {
    std::size_t body_end =
        std::clamp(buffers_.count - buffers_.remainder, begin, end);
    if (begin < body_end) {
      kernels_.update[index(kind_.grad_dtype)][index(kind_.format)]
                     [index(kind_.decay)](args(begin, body_end));
    }
    if (body_end < end) reference_update(kind_, args(body_end, end));
  }

  UpdateArgs args(std::size_t begin, std::size_t end) const {
    return {
        .grad = at(buffers_.grad, buffers_.grad_dtype, begin),
        .weight = at(buffers_.weight, buffers_.weight_dtype, begin),
        .master =
            buffers_.master != nullptr ? buffers_.master + begin : nullptr,
        .low = buffers_.low != nullptr ? buffers_.low + begin : nullptr,
        .exp_avg = buffers_.exp_avg + begin,
        .exp_avg_sq = buffers_.exp_avg_sq + begin,
        .count = end - begin,
        .scalars = &scalars_,
    };
  }

  const AdamBuffers& buffers_;
  AdamScalars scalars_;
  ReferenceKind kind_;
  const Kernels& kernels_;
};

}  // namespace

AdamScalars adam_scalars(const AdamOptions& options, const AdamStep& step) {
  DefaultFloatMode mode;
  auto t = static_cast<double>(step.step);
  double correction1 = 1 - std::pow(options.beta1, t);
  double correction2 = 1 - std::pow(options.beta2, t);
  bool coupled = options.decay == WeightDecay::kL2;
  // Fused in torch's binary; 1 pair of lr and weight_decay in 2^29 tells.
  double decay = std::fma(-options.lr, options.weight_decay, 1.0);
  auto lerp_weight = static_cast<float>(1 - options.beta1);
  bool lerp_from_grad = lerp_weight >= 0.5F;
  return {
      .inverse_scale = step.inverse_scale,
      .clip = options.maximize ? -step.clip : step.clip,
      .decay = coupled ? 1.0F : static_cast<float>(decay),
      .l2 = coupled ? static_cast<float>(options.weight_decay) : 0.0F,
      .lerp_weight = lerp_from_grad ? lerp_weight - 1 : lerp_weight,
      .lerp = lerp_from_grad ? Lerp::kFromGrad : Lerp::kFromAverage,
      .beta2 = static_cast<float>(options.beta2),
      .one_minus_beta2 = static_cast<float>(1 - options.beta2),
      .sqrt_correction2 = static_cast<float>(std::sqrt(correction2)),
      .eps = static_cast<float>(options.eps),
      .minus_step_size = static_cast<float>(-(options.lr / correction1)),
  };
}

Status adam_update_with(Isa isa, const AdamOptions& options,
                        const AdamStep& step, const AdamBuffers& buffers,
                        ThreadPool* pool) {
  ZINF_TRY(options.validate());
  ZINF_TRY(buffers.validate());
  if (step.step < 1) {
    return Status::error(Code::kInvalid,
                         strf("Adam step is %lld, the first one is 1",
                              static_cast<long long>(step.step)));
  }
  Update update(isa, options, step, buffers);
  run_over(pool, buffers.count, [&update](std::size_t begin, std::size_t end) {
    std::uint64_t before = thread_cpu_ns();
    update.run(begin, end);
    usage.cpu_ns += thread_cpu_ns() - before;
    usage.elements += end - begin;
  });
  return {};
}

AdamUsage adam_usage() { return {usage.elements, usage.cpu_ns}; }

Status adam_update(const AdamOptions& options, const AdamStep& step,
                   const AdamBuffers& buffers, ThreadPool* pool) {
  return adam_update_with(best_isa(), options, step, buffers, pool);
}

Status sum_of_squares_with(Isa isa, Dtype dtype, const void* grad,
                           std::size_t count, float inverse_scale,
                           std::span<double> block_sums, ThreadPool* pool) {
  if (block_sums.size() != num_sum_blocks(count)) {
    return Status::error(
        Code::kInvalid,
        strf("sum_of_squares: block_sums has %zu numbers, %zu elements need "
             "%zu",
             block_sums.size(), count, num_sum_blocks(count)));
  }
  if (count > 0 && (grad == nullptr || !is_aligned(grad, dtype_bytes(dtype)))) {
    return Status::error(Code::kInvalid,
                         strf("sum_of_squares: grad at %p is null or not "
                              "aligned to its %zu-byte elements",
                              grad, dtype_bytes(dtype)));
  }
  Kernels::Sum sum = kernels(isa).sum[index(dtype)];
  run_over(pool, count, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += kSumBlock) {
      block_sums[i / kSumBlock] =
          sum(at(grad, dtype, i), std::min(kSumBlock, end - i), inverse_scale);
    }
  });
  return {};
}

Status sum_of_squares(Dtype dtype, const void* grad, std::size_t count,
                      float inverse_scale, std::span<double> block_sums,
                      ThreadPool* pool) {
  return sum_of_squares_with(best_isa(), dtype, grad, count, inverse_scale,
                             block_sums, pool);
}

double total(std::span<const double> block_sums) {
  double sum = 0;
  for (double block : block_sums) sum += block;
  return sum;
}

}  // namespace zinf
