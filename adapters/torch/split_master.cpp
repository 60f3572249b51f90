#include "adapters/torch/split_master.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "adapters/torch/manager.h"
#include "adapters/torch/pins.h"
#include "zinf/cast.h"

namespace zinf {
namespace {

at::Tensor like(const at::Tensor& weight, at::ScalarType dtype) {
  return at::empty_like(weight.detach(), weight.options().dtype(dtype));
}

}  // namespace

bool SplitMaster::possible(const at::Tensor& weight) {
  Unit* unit = Unit::of(weight);
  return unit != nullptr && weight.is_cpu() &&
         weight.scalar_type() == at::kBFloat16 &&
         weight.is_non_overlapping_and_dense() && weight.nbytes() > 0 &&
         weight.nbytes() == unit->bytes();
}

std::shared_ptr<SplitMaster> SplitMaster::create(const at::Tensor& weight) {
  std::shared_ptr<SplitMaster> master(new SplitMaster());
  Unit* unit = Unit::of(weight);
  master->low_ = like(weight, at::kUInt16).zero_();
  unit->manager()->adopt(master->low_, Role::kState, "low");
  unit->watch_edits(master);
  if (unit->escaped()) master->join(weight);
  return master;
}

at::Tensor SplitMaster::join(const at::Tensor& weight) {
  check_watch(weight);
  Pins pins;
  pins.take(weight, Use::kRead);
  std::lock_guard lock(mutex_);
  if (!joined_.defined()) {
    join(*Unit::of(weight),
         {static_cast<const std::byte*>(weight.const_data_ptr()),
          weight.nbytes()});
  }
  return joined_;
}

void SplitMaster::before_edit(Unit& unit, std::span<std::byte> weight) {
  if (updating_) return;
  std::lock_guard lock(mutex_);
  if (!joined_.defined()) join(unit, weight);
}

void SplitMaster::join(Unit& unit, std::span<const std::byte> weight) {
  at::Tensor joined = like(low_, at::kFloat);
  Pins pins;
  pins.take(low_, Use::kRead);
  join_master(reinterpret_cast<const std::uint16_t*>(weight.data()),
              static_cast<const std::uint16_t*>(low_.const_data_ptr()),
              static_cast<float*>(joined.mutable_data_ptr()),
              static_cast<std::size_t>(low_.numel()));
  unit.manager()->adopt(joined, Role::kState, "master");
  joined_ = joined;
  low_ = at::Tensor();
}

void SplitMaster::check_watch(const at::Tensor& weight) {
  Unit* unit = Unit::of(weight);
  if (unit != nullptr && unit->is_watched_by(this)) return;
  std::lock_guard lock(mutex_);
  if (joined_.defined()) return;
  joined_ = weight.detach().to(at::kFloat);
  low_ = at::Tensor();
  if (unit != nullptr) unit->manager()->adopt(joined_, Role::kState, "master");
}

void SplitMaster::split(const at::Tensor& weight, ThreadPool* pool) {
  Unit* unit = Unit::of(weight);
  at::Tensor low = like(weight, at::kUInt16);
  Pins pins;
  pins.take(weight, Use::kChange);
  pins.take(joined_, Use::kRead);
  split_master(static_cast<const float*>(joined_.const_data_ptr()),
               static_cast<std::uint16_t*>(weight.mutable_data_ptr()),
               static_cast<std::uint16_t*>(low.mutable_data_ptr()),
               static_cast<std::size_t>(weight.numel()), pool);
  unit->manager()->adopt(low, Role::kState, "low");
  unit->watch_edits(weak_from_this());
  std::lock_guard lock(mutex_);
  low_ = low;
  joined_ = at::Tensor();
}

Status SplitMaster::update(const AdamOptions& options, const AdamStep& step,
                           AdamTensors tensors, ThreadPool* pool) {
  check_watch(tensors.weight);
  struct Updating {
    std::atomic<bool>& flag;
    explicit Updating(std::atomic<bool>& f) : flag(f) { flag = true; }
    ~Updating() { flag = false; }
  } updating(updating_);
  if (low_.defined()) {
    tensors.low = low_;
    return adam_update(options, step, tensors, pool);
  }
  tensors.master = joined_;
  ZINF_TRY(adam_update(options, step, tensors, pool));
  if (possible(tensors.weight) && !Unit::of(tensors.weight)->escaped()) {
    split(tensors.weight, pool);
  }
  return {};
}

void SplitMaster::prefetch() {
  std::lock_guard lock(mutex_);
  if (Unit* unit = Unit::of(low_.defined() ? low_ : joined_)) unit->prefetch();
}

}  // namespace zinf
