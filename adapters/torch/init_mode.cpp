#include "adapters/torch/init_mode.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>
#include <vector>

#include "adapters/torch/error.h"
#include "adapters/torch/keys.h"
#include "adapters/torch/manager.h"

namespace zinf {
namespace {

struct Birth {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
};

struct State {
  std::shared_ptr<Manager> manager;
  InitMode::Born listener;
  std::vector<Birth> born;
};
thread_local State* state = nullptr;

void switch_mode(bool on) {
  c10::impl::tls_set_dispatch_key_included(kOuterKey, on);
}

}  // namespace

void InitMode::begin(std::shared_ptr<Manager> manager, Born born) {
  if (state != nullptr) {
    throw Error(Status::error(Code::kInvalid,
                              "engine.init() is entered already: it cannot be "
                              "nested"));
  }
  state = new State{std::move(manager), std::move(born), {}};
  switch_mode(true);
}

void InitMode::end() {
  if (state == nullptr) return;
  switch_mode(false);
  std::unique_ptr<State> ended(std::exchange(state, nullptr));
  for (Birth& born : ended->born) {
    auto storage = born.storage.lock();
    Unit* unit = storage ? Unit::of(storage.get()) : nullptr;
    if (unit == nullptr || unit->is_parameter()) continue;
    // What does not fit stays managed, which is right too.
    (void)unit->release(storage.get());
  }
}

bool InitMode::active() {
  return state != nullptr && state->manager != nullptr;
}

std::vector<at::Tensor> InitMode::born() {
  std::vector<at::Tensor> tensors;
  if (state == nullptr) return tensors;
  for (Birth& born : state->born) {
    if (auto tensor = born.tensor.lock()) {
      tensors.emplace_back(std::move(tensor));
    }
  }
  return tensors;
}

InitMode::Inside::Inside() : manager_(std::exchange(state->manager, nullptr)) {
  switch_mode(false);
}

InitMode::Inside::~Inside() {
  state->manager = std::move(manager_);
  switch_mode(true);
}

void InitMode::Inside::adopt_results(const c10::OperatorHandle& op,
                                     const torch::jit::Stack& stack) {
  for (const c10::IValue& value :
       torch::jit::last(stack, op.schema().returns().size())) {
    if (!value.isTensor()) continue;
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !tensor.has_storage() ||
        !tensor.is_floating_point() ||
        Unit::of(tensor.storage().unsafeGetStorageImpl()) != nullptr) {
      continue;
    }
    if (manager_->adopt(tensor, Role::kWeight, {"tensor"})) {
      auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
          tensor.storage().unsafeGetStorageImpl());
      state->born.push_back(
          {c10::weak_intrusive_ptr<c10::StorageImpl>(storage),
           c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr())});
      if (state->listener) state->listener(tensor);
    }
  }
}

}  // namespace zinf
