#include "src/io/driver.h"

#include <cerrno>

namespace zinf::io {

int Driver::register_memory(std::span<std::byte> /*memory*/) {
  return -EOPNOTSUPP;
}

void Driver::unregister_memory(int /*slot*/) {}

}  // namespace zinf::io
