// Alignment arithmetic. Alignments are powers of two.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace zinf {

inline constexpr std::size_t kKiB = std::size_t{1} << 10;
inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr std::size_t kGiB = std::size_t{1} << 30;
inline constexpr std::size_t kPage = 4 * kKiB;
inline constexpr std::size_t kHugePage = 2 * kMiB;

template <std::unsigned_integral T>
constexpr T align_down(T value, T alignment) {
  return value & ~(alignment - 1);
}

template <std::unsigned_integral T>
constexpr T align_up(T value, T alignment) {
  return align_down(value + alignment - 1, alignment);
}

template <std::unsigned_integral T>
constexpr bool is_aligned(T value, T alignment) {
  return (value & (alignment - 1)) == 0;
}

inline bool is_aligned(const void* pointer, std::size_t alignment) {
  return is_aligned(reinterpret_cast<std::uintptr_t>(pointer), alignment);
}

}  // namespace zinf
