#include "src/tier/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zinf::tier {

std::uint64_t detail::checksum_plain(std::span<const std::byte> data) {
  return XXH3_64bits(data.data(), data.size());
}

std::uint64_t checksum(std::span<const std::byte> data) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return detail::checksum_avx2(data);
#endif
  return detail::checksum_plain(data);
}

}  // namespace zinf::tier
