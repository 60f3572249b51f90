// What an operator's arguments mean to managed storages.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "zinf/residency.h"

namespace zinf {

struct ArgumentUse {
  std::uint16_t index;
  Use use;               // kRead or kChange
  bool only_if = false;  // kChange only if Policy::changes_if
};

// From the operator's schema, computed once per operator and thread.
struct Policy {
  c10::OperatorName name;
  std::vector<ArgumentUse> arguments = {};  // that need their data
  std::size_t num_arguments = 0;
  // A bool among the arguments: whether it changes those that are only_if.
  std::optional<std::uint16_t> changes_if = {};
  // Its schema is torch's own. Others' may declare as read what is written.
  bool trusted = true;
  // Whatever it is made of finds its data there: a view that never copies, or
  // an operator of torch with all its tensors pinned.
  bool complete = false;
  // It changes nothing, not even the state of random numbers: after a failure
  // it can be run once more.
  bool repeats = false;
  // How the inner key runs it over lists that are long.
  enum class Pieces : std::uint8_t {
    kNone,
    kElements,  // each element of its lists by itself
    kCat,
  };
  Pieces pieces = Pieces::kNone;
};

const Policy& policy_of(const c10::OperatorHandle& op);

}  // namespace zinf
