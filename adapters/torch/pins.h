// Units that an operator, or somebody in an operator's place, uses now.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include "adapters/torch/unit.h"

namespace zinf {

// Unpins all when it goes, also when an exception passes.
class Pins {
 public:
  Pins() = default;
  ~Pins();
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

  // What is to be used at once is added, then held. What is not managed is
  // passed over. hold() throws what pinning has met.
  void add(const at::TensorBase& tensor, Use use);
  void add(const c10::IValue& value, Use use);
  void add(const c10::Storage& storage, Use use);
  void hold();
  // After hold(), for an operator whose schema may declare as read what is
  // written: see Note [Undeclared writes] in unit.h.
  void watch_pointers();
  // Before hold(), for an operator of the model: see Manager.
  void settle_if_short();

  Manager* manager() const;  // of the first, or null

  // One alone.
  template <typename Used>
  void take(const Used& used, Use use) {
    add(used, use);
    hold();
  }

 private:
  struct Added {
    c10::Storage storage;  // must not go before it is unpinned
    Unit* unit;
    Use use;
  };
  c10::SmallVector<Added, 8> added_;
  std::size_t num_held_ = 0;  // the first of them
};

// The tensor's bytes where the host has them, pinned there.
at::Tensor tensor_in(const Pin& pin, const at::Tensor& like);

// Bytes of units in a list of tensors.
std::size_t managed_bytes(const c10::IValue& list);
// The first unit found in a value, or null.
Unit* first_unit(const c10::IValue& value);

}  // namespace zinf
