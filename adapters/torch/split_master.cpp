#include "adapters/torch/split_master.h"

#include <ATen/ops/empty_like.h>

#include <exception>
#include <utility>

#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/pins.h"
#include "zinf/cast.h"

namespace zinf {
namespace {

at::Tensor like(const at::Tensor& weight, at::ScalarType dtype) {
  return at::empty_like(weight.detach(), weight.options().dtype(dtype));
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()),
          tensor.nbytes()};
}

// An update that was put off takes use_mutex_ too.
void settle(const at::Tensor& weight) {
  if (Unit* unit = Unit::of(weight)) unit->settle();
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
  if (!possible(weight)) {
    throw Error(Status::error(
        Code::kInvalid,
        "a split master needs a managed bfloat16 weight in host memory"));
  }
  std::shared_ptr<SplitMaster> master(new SplitMaster());
  Unit* unit = Unit::of(weight);
  master->low_ = like(weight, at::kUInt16).zero_();
  adopt_state(weight, master->low_, "low");
  if (unit->is_watched()) {
    Pins pins;  // the last thing that another optimizer's master hears
    pins.take(weight, Use::kChange);
  }
  unit->watch_edits(master);
  Pins pins;
  pins.take(weight, Use::kRead);
  if (unit->escaped(weight)) master->join(weight);
  return master;
}

at::Tensor SplitMaster::join(const at::Tensor& weight) {
  settle(weight);
  std::lock_guard use(use_mutex_);
  join_unwatched(weight);
  Pins pins;
  pins.take(weight, Use::kRead);
  std::lock_guard lock(mutex_);
  if (!joined_.defined()) {
    set_joined(joined_copy(bytes_of(weight)), Unit::of(weight));
  }
  return joined_;
}

at::Tensor SplitMaster::renew(const at::Tensor& weight) {
  settle(weight);
  std::lock_guard use(use_mutex_);
  std::lock_guard lock(mutex_);
  if (!joined_.defined())
    set_joined(like(weight, at::kFloat), Unit::of(weight));
  return joined_;
}

at::Tensor SplitMaster::copy(const at::Tensor& weight) {
  settle(weight);
  std::lock_guard use(use_mutex_);
  join_unwatched(weight);
  Pins pins;
  pins.take(weight, Use::kRead);
  std::lock_guard lock(mutex_);
  return joined_.defined() ? joined_.clone() : joined_copy(bytes_of(weight));
}

void SplitMaster::before_edit(Unit& unit, std::span<std::byte> weight) {
  std::lock_guard lock(mutex_);
  if (updater_ == std::this_thread::get_id() || joined_.defined()) return;
  if (updater_ != std::thread::id()) {
    missed_ = true;  // the update joins it at its end
    return;
  }
  set_joined(joined_copy(weight), &unit);
}

bool SplitMaster::wants_content() {
  std::lock_guard lock(mutex_);
  return !joined_.defined();
}

void SplitMaster::before_end(Unit&, std::span<std::byte> weight) {
  std::lock_guard lock(mutex_);
  if (joined_.defined()) return;
  try {
    set_joined(joined_copy(weight), nullptr);
  } catch (const std::exception&) {  // no memory
    hash_ = hash_of(weight);
  }
}

at::Tensor SplitMaster::joined_copy(std::span<const std::byte> weight) {
  at::Tensor joined = like(low_, at::kFloat);
  Pins pins;
  pins.take(low_, Use::kRead);
  join_master(reinterpret_cast<const std::uint16_t*>(weight.data()),
              static_cast<const std::uint16_t*>(low_.const_data_ptr()),
              static_cast<float*>(joined.mutable_data_ptr()),
              static_cast<std::size_t>(low_.numel()));
  return joined;
}

void SplitMaster::set_joined(const at::Tensor& joined, Unit* unit) {
  if (unit != nullptr) {
    unit->manager()->adopt(joined, Role::kState,
                           {unit->full_name().parameter, "master"});
  }
  joined_ = joined;
  low_ = at::Tensor();
  hash_.reset();
}

void SplitMaster::join_unwatched(const at::Tensor& weight) {
  Unit* unit = Unit::of(weight);
  if (unit != nullptr && unit->is_watched_by(this)) return;
  {
    std::lock_guard lock(mutex_);
    if (joined_.defined()) return;
  }
  Pins pins;
  pins.take(weight, Use::kRead);
  // A weight that is another one now is its own master.
  at::Tensor own = weight.detach().to(at::kFloat);
  std::lock_guard lock(mutex_);
  if (joined_.defined()) return;
  bool same = hash_ && *hash_ == hash_of(bytes_of(weight));
  set_joined(same ? joined_copy(bytes_of(weight)) : own, unit);
}

// Stays joined where there is no memory for the halves.
void SplitMaster::try_split(const at::Tensor& weight, ThreadPool* pool) {
  Unit* unit = Unit::of(weight);
  at::Tensor low;
  try {
    low = like(weight, at::kUInt16);
    split_master(static_cast<const float*>(joined_.const_data_ptr()),
                 static_cast<std::uint16_t*>(weight.mutable_data_ptr()),
                 static_cast<std::uint16_t*>(low.mutable_data_ptr()),
                 static_cast<std::size_t>(weight.numel()), pool);
    adopt_state(weight, low, "low");
  } catch (const std::exception&) {
    return;
  }
  unit->watch_edits(weak_from_this());
  std::lock_guard lock(mutex_);
  low_ = low;
  joined_ = at::Tensor();
}

Status SplitMaster::update(const AdamOptions& options, const AdamStep& step,
                           AdamTensors tensors, ThreadPool* pool) {
  const at::Tensor& weight = tensors.weight;
  {
    std::lock_guard use(use_mutex_);
    join_unwatched(weight);
    {
      std::lock_guard lock(mutex_);
      updater_ = std::this_thread::get_id();
      (joined_.defined() ? tensors.master : tensors.low) =
          joined_.defined() ? joined_ : low_;
    }
    Pins pins;  // over the update and the split
    Status status;
    try {
      pins.take(weight, Use::kChange);
      if (tensors.master) pins.take(*tensors.master, Use::kChange);
      status = adam_update(options, step, tensors, pool);
      if (status.ok() && tensors.master && possible(weight) &&
          !Unit::of(weight)->escaped(weight)) {
        try_split(weight, pool);
      }
    } catch (...) {
      std::lock_guard lock(mutex_);
      updater_ = {};
      throw;
    }
    std::lock_guard lock(mutex_);
    updater_ = {};
    if (!status.ok() || !std::exchange(missed_, false)) return status;
  }
  try {
    join(weight);
  } catch (const std::exception& error) {  // the update is done: not again
    return Status::error(Code::kInvalid, error.what());
  }
  return {};
}

at::Tensor SplitMaster::low() {
  std::lock_guard lock(mutex_);
  return low_;
}

void SplitMaster::prefetch() {
  std::lock_guard lock(mutex_);
  if (Unit* unit = Unit::of(low_.defined() ? low_ : joined_)) unit->prefetch();
}

}  // namespace zinf
