// A parameter that is split over ranks.
//
// The parameter's own unit is the whole: it is gathered for its uses (see
// zinf/gather_tier.h). What this rank keeps are slices of it, one-dimensional
// tensors with units of their own: of the weight, which the optimizer updates,
// and of the averaged gradient, which backward passes add up.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "src/shard/tree_sum.h"
#include "zinf/gather_tier.h"
#include "zinf/partition.h"

namespace zinf {

class Ranks;

struct Shard {
  Shard(Ranks& of, std::string parameter, const at::Tensor& whole,
        Slice own_slice)
      : ranks(of),
        name(std::move(parameter)),
        mine(own_slice),
        tensor_(whole.getIntrusivePtr()) {}

  Ranks& ranks;
  const std::string name;
  const Slice mine;               // elements, in the order of memory
  std::uint32_t weight_unit = 0;  // of the exchange
  std::uint32_t grad_unit = 0;

  bool watched = false;  // before_gradient() is called

  at::Tensor weight;  // this rank's; empty where it has none

  // Where somebody else reads the slice, this waits: it is about to be updated.
  std::atomic<bool> is_due = false;

  std::mutex mutex;                 // for what follows
  at::Tensor sum;                   // of parts that are being taken, float32
  shard::TreeSum<at::Tensor> tree;  // the same over the passes of a step
  at::Tensor grad;  // this rank's slice, in the weight's type; or undefined
  // The whole above it that was `p.grad`, while somebody has it.
  c10::weak_intrusive_ptr<c10::TensorImpl> whole_grad{
      c10::intrusive_ptr<c10::TensorImpl>()};

  at::Tensor grad_slice() {
    std::lock_guard lock(mutex);
    return grad;
  }
  // The parameter, as long as it lives: the last of those that have had this
  // memory (weight_norm makes another one of it).
  at::Tensor parameter() {
    std::lock_guard lock(mutex);
    auto impl = tensor_.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }
  void set_parameter(const at::Tensor& tensor) {
    std::lock_guard lock(mutex);
    if (tensor_.lock() == tensor.getIntrusivePtr()) return;
    tensor_ =
        c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
    watched = false;
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor_;
};

}  // namespace zinf
