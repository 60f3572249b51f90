// The sizes of small blocks: multiples of 64 bytes, eight per doubling, so that
// rounding up costs at most 12.5 % (above 512 bytes; below, alignment rules).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "src/base/align.h"

namespace zinf {

inline constexpr std::size_t kMinAlignment = 64;
inline constexpr std::size_t kMaxSmallBytes = 32 * kKiB;
inline constexpr std::size_t kGranule = 64 * kKiB;  // spans are made of these

// Class 0 means "not a small block".
inline constexpr unsigned kNumClasses = 57;

struct SizeClass {
  std::uint32_t bytes = 0;
  std::uint32_t blocks = 0;    // in a span
  std::uint16_t granules = 0;  // of a span
  std::uint16_t cached = 0;    // the most that a thread keeps
  std::uint16_t batch = 0;     // moved at once between thread and centre
};

namespace detail {

constexpr SizeClass make_class(std::uint32_t bytes) {
  SizeClass made{.bytes = bytes};
  // The shortest span of seven blocks or more that loses at most a sixteenth at
  // its end: all classes have one within four granules. Spans of two blocks
  // came and went so often that 32 KiB cost twice as much as malloc's.
  for (std::uint16_t granules = 1; granules <= 4; ++granules) {
    auto span = static_cast<std::uint32_t>(granules * kGranule);
    made.granules = granules;
    made.blocks = span / bytes;
    if (made.blocks >= 7 && (span % bytes) * 16 <= span) break;
  }
  made.cached = static_cast<std::uint16_t>(
      std::clamp<std::size_t>(64 * kKiB / bytes, 8, 128));
  made.batch = static_cast<std::uint16_t>(made.cached / 2);
  return made;
}

constexpr std::array<SizeClass, kNumClasses> make_classes() {
  std::array<SizeClass, kNumClasses> classes{};
  std::uint32_t bytes = 0;
  for (unsigned i = 1; i < kNumClasses; ++i) {
    std::uint32_t doubling = i <= 8 ? 0 : (i - 9) / 8;
    bytes += 64u << doubling;
    classes[i] = make_class(bytes);
  }
  return classes;
}

}  // namespace detail

inline constexpr std::array<SizeClass, kNumClasses> kSizeClasses =
    detail::make_classes();
static_assert(kSizeClasses[kNumClasses - 1].bytes == kMaxSmallBytes);

namespace detail {

constexpr std::size_t max_cached_bytes() {
  std::size_t total = 0;
  for (const SizeClass& c : kSizeClasses) {
    total += std::size_t{c.cached} * c.bytes;
  }
  return total;
}
static_assert(max_cached_bytes() <= 5 * kMiB, "arena.h says so");

}  // namespace detail

namespace detail {

constexpr auto make_class_table() {
  std::array<std::uint8_t, kMaxSmallBytes / 64 + 1> table{};
  unsigned found = 1;
  for (std::size_t units = 0; units < table.size(); ++units) {
    while (kSizeClasses[found].bytes < units * 64) ++found;
    table[units] = static_cast<std::uint8_t>(found);
  }
  return table;
}

inline constexpr auto kClassTable = make_class_table();

}  // namespace detail

// REQUIRES: bytes <= kMaxSmallBytes
inline unsigned size_class_of(std::size_t bytes) {
  return detail::kClassTable[(bytes + 63) / 64];
}

// The smallest class whose blocks are all so aligned, or 0: blocks lie at
// multiples of their size in spans that begin at multiples of kGranule.
inline unsigned size_class_of(std::size_t bytes, std::size_t alignment) {
  if (bytes > kMaxSmallBytes || alignment > kPage) return 0;
  for (unsigned i = size_class_of(bytes); i < kNumClasses; ++i) {
    if (is_aligned(std::size_t{kSizeClasses[i].bytes}, alignment)) return i;
  }
  return 0;
}

}  // namespace zinf
