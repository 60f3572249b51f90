// The element types that weights and gradients come in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zinf {

enum class Dtype : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

constexpr std::size_t dtype_bytes(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : 2;
}

constexpr const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return "float32";
    case Dtype::kBFloat16:
      return "bfloat16";
    case Dtype::kFloat16:
      return "float16";
  }
  return "unknown";
}

}  // namespace zinf
