// The float32 master of a managed bfloat16 weight in two halves: the weight
// itself, and the 16 bits that it lacks (zinf/cast.h).
//
// Note [Edits]: an element of a weight that is edited outside the optimizer
// becomes its own master, the others keep theirs. A float32 master shows by
// comparing which were edited; a split one could not. So it is joined to
// float32 before the first edit, and split again by the next update. While
// somebody has the weight's address, and may edit at any time, it stays joined.
//
// Locks: use_mutex_, then the weight's unit, then mutex_, then the low half's
// unit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include "adapters/torch/adam.h"
#include "adapters/torch/unit.h"

namespace zinf {

// Thread-safe.
class SplitMaster final : public EditWatch,
                          public std::enable_shared_from_this<SplitMaster> {
 public:
  // A bfloat16 weight that is the whole of a unit in host memory.
  static bool possible(const at::Tensor& weight);

  // The weight is its own master. Throws unless it is possible.
  static std::shared_ptr<SplitMaster> create(const at::Tensor& weight);

  // The master in float32, which it is from now until the next update. Writing
  // to it sets the master.
  at::Tensor join(const at::Tensor& weight);
  // The same without the content, for somebody who writes all of it: heals a
  // master, or a weight, that could not be read.
  at::Tensor renew(const at::Tensor& weight);
  // As join(), as a tensor of its own; the master stays as it is.
  at::Tensor copy(const at::Tensor& weight);

  // As adam_update() of adapters/torch/adam.h, with this as the master of the
  // weight.
  Status update(const AdamOptions& options, const AdamStep& step,
                AdamTensors tensors, ThreadPool* pool);

  void prefetch();
  at::Tensor low();  // the half, undefined while it is joined
  void before_edit(Unit& unit, std::span<std::byte> weight) override;
  bool wants_content() override;
  void before_end(Unit& unit, std::span<std::byte> weight) override;

 private:
  SplitMaster() = default;
  // Joins it when nobody tells about the weight's edits any more.
  void join_unwatched(const at::Tensor& weight);
  at::Tensor joined_copy(std::span<const std::byte> weight);
  void set_joined(const at::Tensor& joined, Unit* unit);
  void try_split(const at::Tensor& weight, ThreadPool* pool);

  std::mutex use_mutex_;  // one join, copy or update at a time

  std::mutex mutex_;         // for what follows
  std::thread::id updater_;  // whose edits are the optimizer's own
  bool missed_ = false;      // another thread edited during an update
  // Of a weight that was let go while there was no memory to join.
  std::optional<std::uint64_t> hash_;
  at::Tensor low_;     // uint16, in the shape of the weight; or
  at::Tensor joined_;  // float32
};

}  // namespace zinf
