#include "adapters/torch/adam.h"

#include <ATen/ops/empty_like.h>

#include <string>
#include <vector>

#include "adapters/torch/announcement.h"
#include "adapters/torch/device_adam.h"
#include "adapters/torch/later_update.h"
#include "adapters/torch/pins.h"
#include "adapters/torch/split_master.h"
#include "adapters/torch/update_queue.h"
#include "src/base/strf.h"
#include "zinf/cast.h"

namespace zinf {
namespace {

Status refuse(const char* name, const std::string& problem) {
  return Status::error(Code::kInvalid,
                       strf("Adam: %s %s", name, problem.c_str()));
}

Status check_tensor(const char* name, const at::Tensor& tensor) {
  if (!tensor.defined()) return refuse(name, "is missing");
  if (tensor.layout() != at::kStrided) {
    return refuse(name, "must be dense, it is sparse");
  }
  if (!tensor.is_cpu()) {
    return refuse(name,
                  "must be on the CPU, it is on " + tensor.device().str());
  }
  if (!tensor.is_non_overlapping_and_dense()) {
    return refuse(name, "must be dense in memory: call .contiguous()");
  }
  return {};
}

// The tensor's memory, when it has this dtype and as many elements as the
// weight.
Result<void*> memory_of(const char* name, const at::Tensor& tensor,
                        at::ScalarType dtype, const at::Tensor& weight) {
  std::int64_t numel = weight.numel();
  ZINF_TRY(check_tensor(name, tensor));
  if (tensor.scalar_type() != dtype) {
    return refuse(name, strf("must be %s, it is %s", c10::toString(dtype),
                             c10::toString(tensor.scalar_type())));
  }
  if (tensor.numel() != numel) {
    return refuse(name, strf("has %lld elements, the weight has %lld",
                             static_cast<long long>(tensor.numel()),
                             static_cast<long long>(numel)));
  }
  // Elements are taken in the order of memory.
  if (tensor.strides() != weight.strides() &&
      !(tensor.is_contiguous() && weight.is_contiguous())) {
    return refuse(name, "must lie in memory as the weight does");
  }
  return tensor.data_ptr();
}

Result<Dtype> dtype_of(const char* name, const at::Tensor& tensor) {
  ZINF_TRY(check_tensor(name, tensor));
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kHalf:
      return Dtype::kFloat16;
    default:
      return refuse(name, strf("must be float32, bfloat16 or float16, it is %s",
                               c10::toString(tensor.scalar_type())));
  }
}

void prefetch(const AdamItem& item) {
  const AdamTensors& tensors = item.tensors;
  if (item.split != nullptr) item.split->prefetch();
  for (const at::Tensor* tensor : {&tensors.weight, &tensors.grad,
                                   &tensors.exp_avg, &tensors.exp_avg_sq}) {
    // What is on a device leaves it for an update on the host.
    Unit* unit = Unit::of(*tensor);
    if (unit == nullptr || tensor->device() != tensors.exp_avg.device()) {
      continue;
    }
    unit->prefetch();
  }
  for (const auto* tensor : {&tensors.master, &tensors.low}) {
    if (!tensor->has_value()) continue;
    if (Unit* unit = Unit::of(**tensor)) unit->prefetch();
  }
}

// Through copies, which waits for the device.
Status update_through_copies(const AdamOptions& options, const AdamStep& step,
                             AdamTensors tensors, ThreadPool* pool) {
  at::Tensor weight = tensors.weight;
  tensors.weight = weight.cpu();
  tensors.grad = tensors.grad.cpu();
  ZINF_TRY(adam_update(options, step, tensors, pool));
  try {
    weight.copy_(tensors.weight);
  } catch (const std::exception& error) {  // the update is made: not again
    return Status::error(Code::kIo, error.what());
  }
  return {};
}

// States as they lie in the host's memory: a thread of ours may make the update
// while others look at them.
class Unseen {
 public:
  Status take(AdamTensors& tensors) {
    std::vector<at::Tensor*> states = {&tensors.exp_avg, &tensors.exp_avg_sq};
    if (tensors.master) states.push_back(&*tensors.master);
    Announcement announcement;
    for (at::Tensor* state : states) {
      if (Unit* unit = Unit::of(*state)) announcement.add(*unit, Use::kChange);
    }
    announcement.make();
    for (at::Tensor* state : states) {
      Unit* unit = Unit::of(*state);
      if (unit == nullptr) continue;
      ZINF_ASSIGN(Pin pin, unit->pin_unseen(Use::kChange));
      *state = tensor_in(pin, *state);
      pins_.push_back(std::move(pin));
    }
    return {};
  }

 private:
  std::vector<Pin> pins_;
};

// Where the host keeps the weight and its gradient.
Status update_on_host(const AdamOptions& options, const AdamStep& step,
                      AdamTensors tensors, ThreadPool* pool) {
  Unit* weight = Unit::of(tensors.weight);
  Unit* grad = Unit::of(tensors.grad);
  if (weight == nullptr || grad == nullptr) {
    return update_through_copies(options, step, tensors, pool);
  }
  {
    Result<Pin> grad_pin = grad->pin_on_host(Use::kRead);
    Result<Pin> weight_pin = grad_pin.ok() ? weight->pin_on_host(Use::kChange)
                                           : Result<Pin>(grad_pin.status());
    if (weight_pin.status().code() == Code::kInvalid) {  // somebody uses it
      // A thread of ours does not know on which stream: whoever needs it next
      // tries again.
      if (HostTier::on_own_thread()) {
        return Status::error(Code::kOverBudget, weight_pin.status().text());
      }
      return update_through_copies(options, step, tensors, pool);
    }
    ZINF_TRY(weight_pin.status());
    tensors.grad = tensor_in(*grad_pin, tensors.grad);
    tensors.weight = tensor_in(*weight_pin, tensors.weight);
    Unseen states;
    ZINF_TRY(states.take(tensors));
    ZINF_TRY(adam_update(options, step, tensors, pool));
  }
  weight->return_to_device();
  return {};
}

// Inside backward, autograd has the gradient too.
bool put_off(const AdamOptions& options, const AdamStep& step,
             const AdamItem& item, bool may_wait) {
  bool on_device = !item.tensors.weight.is_cpu();
  if (on_device ? !item.tensors.exp_avg.is_cpu() : !may_wait) return false;
  auto later = LaterUpdate::put_off(options, step, item, may_wait ? 1 : 2);
  if (later != nullptr && on_device) UpdateQueue::instance().add(later);
  return later != nullptr;
}

}  // namespace

at::Tensor matching(const at::Tensor& grad, const at::Tensor& weight) {
  if (grad.scalar_type() == weight.scalar_type() &&
      grad.strides() == weight.strides()) {
    return grad;
  }
  return at::empty_like(weight, grad.options().dtype(weight.scalar_type()))
      .copy_(grad);
}

Status adam_update_item(const AdamOptions& options, const AdamStep& step,
                        const AdamItem& item, ThreadPool* pool) {
  AdamTensors tensors = item.tensors;
  tensors.grad = matching(tensors.grad, tensors.weight);
  if (item.split != nullptr) {
    return item.split->update(options, step, tensors, pool);
  }
  if (tensors.weight.is_cpu()) {
    return adam_update(options, step, tensors, pool);
  }
  return tensors.exp_avg.is_cpu()
             ? update_on_host(options, step, tensors, pool)
             : adam_update_on_device(options, step, tensors);
}

// On a CPU with AVX-512 too: torch has no AVX-512 variant of its fused Adam,
// and takes the one for AVX2.
std::size_t torch_remainder(std::size_t numel) {
  constexpr std::size_t kLanes = 8;
  return numel % kLanes;
}

Result<AdamBuffers> adam_buffers(const AdamTensors& tensors) {
  AdamBuffers buffers;
  ZINF_ASSIGN(buffers.weight_dtype, dtype_of("weight", tensors.weight));
  ZINF_ASSIGN(buffers.grad_dtype, dtype_of("grad", tensors.grad));
  const at::Tensor& weight = tensors.weight;
  buffers.count = static_cast<std::size_t>(weight.numel());
  buffers.weight = tensors.weight.data_ptr();
  ZINF_ASSIGN(buffers.grad, memory_of("grad", tensors.grad,
                                      tensors.grad.scalar_type(), weight));
  ZINF_ASSIGN(void* exp_avg,
              memory_of("exp_avg", tensors.exp_avg, at::kFloat, weight));
  ZINF_ASSIGN(void* exp_avg_sq,
              memory_of("exp_avg_sq", tensors.exp_avg_sq, at::kFloat, weight));
  buffers.exp_avg = static_cast<float*>(exp_avg);
  buffers.exp_avg_sq = static_cast<float*>(exp_avg_sq);
  if (tensors.master) {
    ZINF_ASSIGN(void* master,
                memory_of("master", *tensors.master, at::kFloat, weight));
    buffers.master = static_cast<float*>(master);
  }
  if (tensors.low) {
    ZINF_ASSIGN(void* low, memory_of("low", *tensors.low, at::kUInt16, weight));
    buffers.low = static_cast<std::uint16_t*>(low);
  }
  return buffers;
}

void hold(Pins& pins, const AdamTensors& tensors) {
  pins.add(tensors.weight, Use::kChange);
  pins.add(tensors.grad, Use::kRead);
  pins.add(tensors.exp_avg, Use::kChange);
  pins.add(tensors.exp_avg_sq, Use::kChange);
  if (tensors.master) pins.add(*tensors.master, Use::kChange);
  if (tensors.low) pins.add(*tensors.low, Use::kChange);
  pins.hold();
}

Status adam_update(const AdamOptions& options, const AdamStep& step,
                   const AdamTensors& tensors, ThreadPool* pool,
                   double* grad_squares) {
  Pins pins;
  hold(pins, tensors);
  ZINF_ASSIGN(AdamBuffers buffers, adam_buffers(tensors));
  buffers.remainder = torch_remainder(buffers.count);
  ZINF_TRY(buffers.validate());
  if (buffers.master != nullptr) {
    follow_edits(buffers.weight_dtype, buffers.weight, buffers.master,
                 buffers.count, pool);
  }
  std::vector<double> sums;
  if (grad_squares != nullptr) {
    sums.resize(num_sum_blocks(buffers.count));
    buffers.block_sums = sums;
  }
  ZINF_TRY(adam_update(options, step, buffers, pool));
  if (grad_squares != nullptr) *grad_squares = total(sums);
  return {};
}

Status adam_update_all(const AdamOptions& options, float inverse_scale,
                       float clip, const std::vector<AdamItem>& items,
                       bool may_wait) {
  std::shared_ptr<ThreadPool> pool = update_pool();
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].tensors.weight.numel() == 0) continue;
    AdamStep step{
        .step = items[i].step, .inverse_scale = inverse_scale, .clip = clip};
    if (!put_off(options, step, items[i], may_wait)) {
      if (i + 1 < items.size()) prefetch(items[i + 1]);
      ZINF_TRY(adam_update_item(options, step, items[i], pool.get()));
    }
    // A graph that has saved the old weight must notice.
    items[i].tensors.weight.unsafeGetTensorImpl()->bump_version();
  }
  return {};
}

Result<double> sum_of_squares(const at::Tensor& grad, float inverse_scale,
                              ThreadPool* pool) {
  Pins pins;
  pins.take(grad, Use::kRead);
  ZINF_ASSIGN(Dtype dtype, dtype_of("grad", grad));
  auto numel = static_cast<std::size_t>(grad.numel());
  std::vector<double> sums(num_sum_blocks(numel));
  ZINF_TRY(sum_of_squares(dtype, grad.const_data_ptr(), numel, inverse_scale,
                          sums, pool));
  return total(sums);
}

}  // namespace zinf
