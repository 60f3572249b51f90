// Memory of a device for what an operator makes.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

#include "adapters/torch/manager.h"

namespace zinf {

// Calls make(). Where that finds no memory on the manager's device, units leave
// it and make() is called once more: it must have changed nothing. `manager`
// may be null.
template <typename Make>
void with_room(Manager* manager, const Make& make) {
  std::uint64_t had = 0;
  try {
    make();
    return;
  } catch (const c10::OutOfMemoryError&) {
    if (manager == nullptr || !manager->has_device()) throw;
    had = manager->give_way_on_device();
    if (had == 0) throw;
  }
  make();
  manager->stay_below_on_device(had);
}

}  // namespace zinf
