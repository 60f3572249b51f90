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

  // What is not managed is passed over. Throws what pinning has met.
  void take(const at::TensorBase& tensor, Use use);
  void take(const c10::IValue& value, Use use);
  void take(const c10::Storage& storage, Use use);

 private:
  struct Held {
    c10::Storage storage;  // must not go before it is unpinned
    Unit* unit;
  };
  c10::SmallVector<Held, 8> held_;
};

// Bytes of units in a list of tensors.
std::size_t managed_bytes(const c10::IValue& list);
// The first unit found in a value, or null.
Unit* first_unit(const c10::IValue& value);

}  // namespace zinf
