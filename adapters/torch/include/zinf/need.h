#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

namespace zinf {

// What Engine::probe() has found.
struct Need {
  std::uint64_t least_bytes = 0;  // of host_memory, for the step
  std::uint64_t limit_bytes = 0;  // host_memory as it is

  bool fits() const { return least_bytes <= limit_bytes; }
  std::string text() const;
};
std::ostream& operator<<(std::ostream& stream, const Need& need);

}  // namespace zinf
