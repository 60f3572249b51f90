#include "adapters/torch/pins.h"

namespace zinf {

Pins::~Pins() {
  for (Held& held : held_) {
    held.unit->unpin(held.storage.unsafeGetStorageImpl());
  }
}

void Pins::take(const c10::Storage& storage, Use use) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  Unit* unit = impl == nullptr ? nullptr : Unit::of(impl);
  if (unit == nullptr) return;
  unit->pin(impl, use);
  held_.push_back({storage, unit});
}

void Pins::take(const at::TensorBase& tensor, Use use) {
  if (!tensor.defined()) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->has_storage()) take(impl->unsafe_storage(), use);
}

void Pins::take(const c10::IValue& value, Use use) {
  if (value.isTensor()) {
    take(value.toTensor(), use);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) take(element.toTensor(), use);
    }
  } else if (value.isStorage()) {
    take(value.toStorage(), use);
  }
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
