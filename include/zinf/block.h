// Memory with its owner.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace zinf {

// Memory of a tier. The bytes of a device's are not for the host to touch. It
// stays while the owner is held.
struct Block {
  std::span<std::byte> bytes;
  std::shared_ptr<void> owner;
};

}  // namespace zinf
