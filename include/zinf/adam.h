// Adam and AdamW on the CPU, in one pass over memory.
//
// One pass unscales and clips the gradient, updates the moments and the weight
// and rounds it to the weight's type ([Note: one cast rule] in zinf/cast.h).
// All arithmetic is fp32, every element by itself, and the same on every CPU:
// neither threads, nor splitting a call, nor the instruction set changes a bit.
// The caller's floating-point mode (rounding, flush-to-zero) is set aside
// meanwhile.
//
// [Note: torch's bits] With fp32 weights the result equals torch.optim.Adam and
// AdamW(fused=True) of torch 2.13 on CPU bit for bit, after unscale_ and
// clip_grad_norm_ with the same factors. Two exceptions. NaN is always the
// canonical NaN 0x7FC00000. And torch computes the last numel % 8 elements of a
// tensor in another loop, which rounds exp_avg_sq differently: ask for that
// with `AdamBuffers::remainder`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "zinf/dtype.h"
#include "zinf/status.h"

namespace zinf {

class ThreadPool;

enum class WeightDecay : std::uint8_t {
  kDecoupled,  // AdamW: weight *= 1 - lr * weight_decay
  kL2,         // Adam: grad += weight * weight_decay
};

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  WeightDecay decay = WeightDecay::kDecoupled;
  bool maximize = false;  // climb instead of descend
  bool amsgrad = false;   // not supported: refused by validate()

  // kInvalid with every problem in one text.
  Status validate() const;
};

// What changes from one step to the next.
struct AdamStep {
  std::int64_t step = 1;  // 1 at the first update

  // The gradient is multiplied by the one, then by the other. They are data,
  // not options: a NaN here makes NaN weights, as it does in torch.
  float inverse_scale = 1;
  float clip = 1;
};

// Sums of squares are made of blocks of so many elements, see `block_sums`.
inline constexpr std::size_t kSumBlock = 4096;

// Elements of one call. A weight that is not fp32 has its fp32 master either in
// `master`, or split: the bf16 weight is the upper half and `low` the lower
// (see zinf/cast.h). Nothing is owned; buffers must not overlap. Buffers that
// are exact multiples of 128 or 256 MiB apart make the update 2 or 5 times
// slower on AMD Zen 3 (measured; torch's update too): leave 64 KiB more between
// them.
struct AdamBuffers {
  std::size_t count = 0;  // elements in each buffer

  Dtype grad_dtype = Dtype::kFloat32;
  const void* grad = nullptr;

  Dtype weight_dtype = Dtype::kFloat32;
  void* weight = nullptr;        // with `master` only written
  float* master = nullptr;       // for bf16 and fp16 weights
  std::uint16_t* low = nullptr;  // for bf16 weights, instead of `master`
  float* exp_avg = nullptr;      // zero before the first step
  float* exp_avg_sq = nullptr;   // zero before the first step

  // How many of the last elements follow torch's remainder loop.
  std::size_t remainder = 0;

  // Empty, or one number per kSumBlock elements (the last block may be shorter)
  // that receives the sum of squares of the unscaled, not yet clipped gradient.
  std::span<double> block_sums = {};

  // kInvalid with every problem in one text: null, misaligned or overlapping
  // buffers, a format that does not exist.
  Status validate() const;
};

// One update of all elements. Checks options, step and buffers first: on an
// error nothing was written. Thread-safe for disjoint buffers.
Status adam_update(const AdamOptions& options, const AdamStep& step,
                   const AdamBuffers& buffers, ThreadPool* pool = nullptr);

// What the updates of this process took, in sum.
struct AdamUsage {
  std::uint64_t elements = 0;
  std::uint64_t cpu_ns = 0;  // of all threads
};
AdamUsage adam_usage();

constexpr std::size_t num_sum_blocks(std::size_t count) {
  return (count + kSumBlock - 1) / kSumBlock;
}

// Fills `block_sums` (num_sum_blocks(count) of them) as adam_update() would. A
// tensor may be treated in parts that begin at multiples of kSumBlock.
Status sum_of_squares(Dtype dtype, const void* grad, std::size_t count,
                      float inverse_scale, std::span<double> block_sums,
                      ThreadPool* pool = nullptr);

// The blocks added up in their order.
double total(std::span<const double> block_sums);

}  // namespace zinf
