// Adam on torch tensors: checks them and hands their memory to zinf/adam.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "zinf/adam.h"
#include "zinf/status.h"

namespace zinf {

class Pins;
class SplitMaster;
class ThreadPool;

// Dense CPU tensors with equal numbers of elements and strides. The gradient
// may be float32, bfloat16 or float16 whatever the weight is.
struct AdamTensors {
  at::Tensor weight;  // float32, bfloat16 or float16
  at::Tensor grad;
  at::Tensor exp_avg;                // float32
  at::Tensor exp_avg_sq;             // float32
  std::optional<at::Tensor> master;  // float32, for a narrow weight
  std::optional<at::Tensor> low;     // uint16, for a bfloat16 weight instead
};

// In memory for one update, from here on.
void hold(Pins& pins, const AdamTensors& tensors);

// How many last elements of a tensor torch's fused Adam treats in its remainder
// loop on this CPU: see [Note: torch's bits] in zinf/adam.h.
std::size_t torch_remainder(std::size_t numel);

// kInvalid names the tensor and what is wrong with it. The buffers live as long
// as the tensors' storages.
Result<AdamBuffers> adam_buffers(const AdamTensors& tensors);

// One update of the whole tensors, with torch's bits in the remainder too.
// Where `grad_squares` points receives the sum of squares of the unscaled, not
// yet clipped gradient; null costs nothing.
Status adam_update(const AdamOptions& options, const AdamStep& step,
                   const AdamTensors& tensors, ThreadPool* pool,
                   double* grad_squares = nullptr);

// One tensor's part of a step over many. The weight and its gradient may be on
// a device, its states there or on the CPU: the update is made where they are.
// A gradient of another type or layout than the weight's is converted first.
struct AdamItem {
  AdamTensors tensors;
  std::shared_ptr<SplitMaster> split;  // the master, when it is split
  std::int64_t step = 1;
};

Status adam_update_item(const AdamOptions& options, const AdamStep& step,
                        const AdamItem& item, ThreadPool* pool);

// As autograd would have it: in the weight's type and layout.
at::Tensor matching(const at::Tensor& grad, const at::Tensor& weight);

// The same for each item in turn; what the next one needs is on its way
// meanwhile. With `may_wait` some are put off (later_update.h).
Status adam_update_all(const AdamOptions& options, float inverse_scale,
                       float clip, const std::vector<AdamItem>& items,
                       bool may_wait);

// The sum of squares alone.
Result<double> sum_of_squares(const at::Tensor& grad, float inverse_scale,
                              ThreadPool* pool);

}  // namespace zinf
