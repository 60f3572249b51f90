// What a benchmark writes, so that a reader can tell every page from every
// other: 4 KiB pages of noise that begin with the page's offset in the file and
// the number of the pass that wrote it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "src/base/align.h"

namespace zinf::io {

struct PageStamp {
  std::uint64_t offset = 0;
  std::uint64_t pass = 0;

  bool operator==(const PageStamp&) const = default;
};

// Fills memory with pages of noise; the stamps are still missing.
inline void fill_pages(std::span<std::byte> memory) {
  std::uint64_t state = 1;
  for (std::size_t i = 0; i + 8 <= memory.size(); i += 8) {
    if (i % kPage == 0) state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::uint64_t word = state ^ (state >> 29);
    std::memcpy(memory.data() + i, &word, 8);
  }
}

// Stamps the pages as those at `offset`; costs a cache line per page.
inline void stamp_pages(std::span<std::byte> memory, std::uint64_t offset,
                        std::uint64_t pass) {
  for (std::size_t i = 0; i < memory.size(); i += kPage) {
    PageStamp stamp{offset + i, pass};
    std::memcpy(memory.data() + i, &stamp, sizeof stamp);
  }
}

// Makes pages that no stamp and no noise fits.
inline void spoil_pages(std::span<std::byte> memory) {
  for (std::size_t i = 0; i < memory.size(); i += kPage) {
    std::memset(memory.data() + i, 0xFF, 2 * sizeof(PageStamp));
  }
}

// The first byte (from the memory's begin) that is not as it was stamped.
inline std::optional<std::size_t> first_wrong_byte(
    std::span<const std::byte> memory, std::uint64_t offset,
    std::uint64_t pass) {
  alignas(8) std::array<std::byte, kPage> wanted;
  fill_pages(wanted);
  for (std::size_t i = 0; i < memory.size(); i += kPage) {
    stamp_pages(wanted, offset + i, pass);
    const std::byte* got = memory.data() + i;
    if (std::memcmp(got, wanted.data(), kPage) == 0) continue;
    std::size_t byte = 0;
    while (got[byte] == wanted[byte]) ++byte;
    return i + byte;
  }
  return std::nullopt;
}

}  // namespace zinf::io
