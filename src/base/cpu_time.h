// CPU time of the calling thread.
#pragma once

#include <time.h>

#include <cstdint>

namespace zinf {

inline std::uint64_t thread_cpu_ns() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<std::uint64_t>(used.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(used.tv_nsec);
}

}  // namespace zinf
