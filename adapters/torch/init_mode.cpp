#include "adapters/torch/init_mode.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>
#include <vector>

#include "adapters/torch/error.h"
#include "adapters/torch/keys.h"
#include "adapters/torch/manager.h"

namespace zinf {
namespace {

struct State {
  std::shared_ptr<Manager> manager;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> born;
};
thread_local State* state = nullptr;

void switch_mode(bool on) {
  c10::impl::tls_set_dispatch_key_included(kOuterKey, on);
}

}  // namespace

void InitMode::begin(std::shared_ptr<Manager> manager) {
  if (state != nullptr) {
    throw Error(Status::error(Code::kInvalid,
                              "engine.init() is entered already: it cannot be "
                              "nested"));
  }
  state = new State{std::move(manager), {}};
  switch_mode(true);
}

void InitMode::end() {
  if (state == nullptr) return;
  switch_mode(false);
  std::unique_ptr<State> ended(std::exchange(state, nullptr));
  for (auto& weak : ended->born) {
    auto storage = weak.lock();
    Unit* unit = storage ? Unit::of(storage.get()) : nullptr;
    if (unit == nullptr || unit->is_parameter()) continue;
    // What does not fit stays managed, which is right too.
    (void)unit->release(storage.get());
  }
}

bool InitMode::active() {
  return state != nullptr && state->manager != nullptr;
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
    if (manager_->adopt(tensor, Role::kWeight, "tensor")) {
      state->born.emplace_back(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
              tensor.storage().unsafeGetStorageImpl()));
    }
  }
}

}  // namespace zinf
