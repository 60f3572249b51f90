// The float32 master of a managed bfloat16 weight in two halves: the weight
// itself, and the 16 bits that it lacks (zinf/cast.h).
//
// Note [Edits]: an element of a weight that is edited outside the optimizer
// becomes its own master, the others keep theirs. A float32 master shows by
// comparing which were edited; a split one could not. So it is joined to
// float32 before the first edit, and split again by the next update. While
// somebody has the weight's address, and may edit at any time, it stays joined.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <span>

#include "adapters/torch/adam.h"
#include "adapters/torch/unit.h"

namespace zinf {

// One update at a time; the rest is thread-safe.
class SplitMaster final : public EditWatch,
                          public std::enable_shared_from_this<SplitMaster> {
 public:
  // A bfloat16 weight that is the whole of a unit in host memory.
  static bool possible(const at::Tensor& weight);

  // The weight is its own master. REQUIRES possible(weight).
  static std::shared_ptr<SplitMaster> create(const at::Tensor& weight);

  // The master in float32, which it is from now until the next update. Writing
  // to it sets the master.
  at::Tensor join(const at::Tensor& weight);

  // As adam_update() of adapters/torch/adam.h, with this as the master of the
  // weight.
  Status update(const AdamOptions& options, const AdamStep& step,
                AdamTensors tensors, ThreadPool* pool);

  void prefetch();
  void before_edit(Unit& unit, std::span<std::byte> weight) override;

 private:
  SplitMaster() = default;
  // A weight that got another storage without our knowing is new: its own
  // master.
  void check_watch(const at::Tensor& weight);
  void join(Unit& unit, std::span<const std::byte> weight);
  void split(const at::Tensor& weight, ThreadPool* pool);

  std::atomic<bool> updating_ = false;
  std::mutex mutex_;  // for what follows

  at::Tensor low_;     // uint16, in the shape of the weight; or
  at::Tensor joined_;  // float32
};

}  // namespace zinf
