// Compiled for AVX2 (CMakeLists.txt), called only where the CPU has it.
#include "src/tier/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zinf::tier::detail {

std::uint64_t checksum_avx2(std::span<const std::byte> data) {
  return XXH3_64bits(data.data(), data.size());
}

}  // namespace zinf::tier::detail
