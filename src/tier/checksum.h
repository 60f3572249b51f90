// The checksum of blocks and metadata: XXH3, 64 bits (docs/formats/store.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zinf::tier {

// The same number on every CPU; with AVX2 where there is.
std::uint64_t checksum(std::span<const std::byte> data);

namespace detail {
std::uint64_t checksum_plain(std::span<const std::byte> data);
std::uint64_t checksum_avx2(std::span<const std::byte> data);
}  // namespace detail

}  // namespace zinf::tier
