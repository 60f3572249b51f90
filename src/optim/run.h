// Runs a body over ranges of elements on a pool, in the default floating-point
// mode: a caller or a worker that flushes subnormals (torch.set_flush_denormal)
// or rounds otherwise would change results with the number of threads.
#pragma once

#include <cfenv>
#include <cstddef>
#include <functional>

#include "zinf/adam.h"
#include "zinf/thread_pool.h"

namespace zinf {

class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&saved_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::fenv_t saved_;
};

// Below this a range is not worth waking a thread for. Ranges begin at
// multiples of it, and so of kSumBlock.
inline constexpr std::size_t kGrain = 4 * kSumBlock;

inline void run_over(
    ThreadPool* pool, std::size_t count,
    const std::function<void(std::size_t begin, std::size_t end)>& body) {
  auto in_default_mode = [&body](std::size_t begin, std::size_t end) {
    DefaultFloatMode mode;
    body(begin, end);
  };
  if (count == 0) return;
  if (pool == nullptr) {
    in_default_mode(0, count);
  } else {
    pool->run(count, kGrain, in_default_mode);
  }
}

}  // namespace zinf
