#include "zinf/thread_pool.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <numeric>
#include <thread>
#include <vector>

#include "src/base/mutex.h"

namespace zinf {
namespace {

RC_GTEST_PROP(ThreadPool, CoversEveryElementOnceOnGrainBounds, ()) {
  auto count = static_cast<std::size_t>(*rc::gen::inRange(0, 5000));
  auto grain = static_cast<std::size_t>(*rc::gen::inRange(1, 700));
  ThreadPool pool(*rc::gen::inRange(1, 6));
  std::vector<int> hits(count, 0);
  Mutex mutex;
  bool on_grain = true;
  pool.run(count, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) ++hits[i];
    MutexLock lock(mutex);
    on_grain &= begin % grain == 0 && (end % grain == 0 || end == count);
  });
  RC_ASSERT(on_grain);
  RC_ASSERT(hits == std::vector<int>(count, 1));
}

TEST(ThreadPool, SerializesCallersFromManyThreads) {
  ThreadPool pool(3);
  std::vector<long> sums(4, 0);
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < sums.size(); ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 50; ++round) {
        std::vector<long> parts(1000, 0);
        pool.run(parts.size(), 10, [&](std::size_t begin, std::size_t end) {
          for (std::size_t i = begin; i < end; ++i) {
            parts[i] = static_cast<long>(i);
          }
        });
        sums[caller] += std::accumulate(parts.begin(), parts.end(), 0L);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sums, std::vector<long>(4, 50L * 999 * 1000 / 2));
}

}  // namespace
}  // namespace zinf
