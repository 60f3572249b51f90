#include "adapters/torch/keys.h"

namespace zinf {
namespace {

// The key set is protected; a pointer to a member of a derived class reaches it
// without undefined behaviour.
struct KeyAccess : c10::TensorImpl {
  static constexpr c10::DispatchKeySet c10::TensorImpl::* keys() {
    return &KeyAccess::key_set_;
  }
};

}  // namespace

void add_keys(c10::TensorImpl& tensor) {
  auto& keys = tensor.*KeyAccess::keys();
  keys = keys.add(kOuterKey).add(kInnerKey);
}

void remove_keys(c10::TensorImpl& tensor) {
  auto& keys = tensor.*KeyAccess::keys();
  keys = keys.remove(kOuterKey).remove(kInnerKey);
}

}  // namespace zinf
