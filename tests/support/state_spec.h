// States for tests of tiers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "zinf/store.h"

namespace zinf {

inline constexpr std::size_t kStateBytes = 8192;

inline StateSpec weight_spec(const std::string& unit,
                             std::uint64_t bytes = kStateBytes) {
  return {.unit = unit,
          .state = "weight",
          .dtype = "uint8",
          .shape = {bytes},
          .bytes = bytes};
}

}  // namespace zinf
