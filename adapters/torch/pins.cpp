#include "adapters/torch/pins.h"

#include <ATen/ops/from_blob.h>

#include "adapters/torch/announcement.h"
#include "adapters/torch/hooks.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/shard.h"

namespace zinf {

Pins::~Pins() {
  for (std::size_t i = 0; i < num_held_; ++i) {
    added_[i].unit->unpin(added_[i].storage.unsafeGetStorageImpl());
  }
}

void Pins::add(const c10::Storage& storage, Use use) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  Unit* unit = impl == nullptr ? nullptr : Unit::of(impl);
  if (unit != nullptr) added_.push_back({storage, unit, use});
}

void Pins::add(const at::TensorBase& tensor, Use use) {
  if (!tensor.defined()) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage()) return;
  std::size_t before = added_.size();
  add(impl->unsafe_storage(), use);
  if (added_.size() == before) return;
  // A parameter that was frozen when it was split over ranks.
  const Unit& unit = *added_.back().unit;
  if (unit.shard() != nullptr && !unit.shard()->watched &&
      impl->requires_grad()) {
    watch_gradients(unit.manager(), at::Tensor(tensor));
  }
}

void Pins::add(const c10::IValue& value, Use use) {
  if (value.isTensor()) {
    add(value.toTensor(), use);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) add(element.toTensor(), use);
    }
  } else if (value.isStorage()) {
    add(value.toStorage(), use);
  }
}

Manager* Pins::manager() const {
  return added_.empty() ? nullptr : added_[0].unit->manager().get();
}

void Pins::settle_if_short() {
  if (Manager* first = manager()) first->settle_if_short();
}

void Pins::hold() {
  for (std::size_t i = num_held_; i < added_.size(); ++i) {
    added_[i].unit->settle();
  }
  Announcement announcement;
  for (std::size_t i = num_held_; i < added_.size(); ++i) {
    announcement.add(*added_[i].unit, added_[i].use);
  }
  announcement.make();
  for (; num_held_ < added_.size(); ++num_held_) {
    Added& added = added_[num_held_];
    added.unit->pin(added.storage.unsafeGetStorageImpl(), added.use);
  }
}

void Pins::watch_pointers() {
  for (const Added& added : added_) {
    if (added.use != Use::kRead) continue;
    added.unit->watch_pointer(added.storage.unsafeGetStorageImpl());
  }
}

at::Tensor tensor_in(const Pin& pin, const at::Tensor& like) {
  auto offset = static_cast<std::size_t>(like.storage_offset());
  return at::for_blob(pin.bytes().data() + offset * like.element_size(),
                      like.sizes())
      .strides(like.strides())
      .options(at::TensorOptions().dtype(like.scalar_type()))
      .make_tensor();
}

std::size_t managed_bytes(const c10::IValue& list) {
  std::size_t bytes = 0;
  for (const c10::IValue& element : list.toListRef()) {
    if (!element.isTensor()) continue;
    if (Unit* unit = Unit::of(element.toTensor())) bytes += unit->bytes();
  }
  return bytes;
}

Unit* first_unit(const c10::IValue& value) {
  if (value.isTensor()) return Unit::of(value.toTensor());
  if (!value.isList()) return nullptr;
  for (const c10::IValue& element : value.toListRef()) {
    if (!element.isTensor()) continue;
    if (Unit* unit = Unit::of(element.toTensor())) return unit;
  }
  return nullptr;
}

}  // namespace zinf
