#include "zinf/thread_pool.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sys/resource.h>

#include <numeric>
#include <thread>
#include <vector>

#include "src/base/mutex.h"
#include "tests/support/child.h"
#include "tests/support/sanitized.h"

namespace zinf {
namespace {

RC_GTEST_PROP(ThreadPool, CoversEveryElementOnceOnGrainBounds, ()) {
  auto count = static_cast<std::size_t>(*rc::gen::inRange(0, 5000));
  auto grain = static_cast<std::size_t>(*rc::gen::inRange(1, 700));
  auto pool = ThreadPool::create(*rc::gen::inRange(1, 6)).value();
  std::vector<int> hits(count, 0);
  Mutex mutex;
  bool on_grain = true;
  pool->run(count, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) ++hits[i];
    MutexLock lock(mutex);
    on_grain &= begin % grain == 0 && (end % grain == 0 || end == count);
  });
  RC_ASSERT(on_grain);
  RC_ASSERT(hits == std::vector<int>(count, 1));
}

TEST(ThreadPool, SerializesCallersFromManyThreads) {
  auto pool = ThreadPool::create(3).value();
  std::vector<long> sums(4, 0);
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < sums.size(); ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 50; ++round) {
        std::vector<long> parts(1000, 0);
        pool->run(parts.size(), 10, [&](std::size_t begin, std::size_t end) {
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

TEST(ThreadPool, RefusesNoThreads) {
  EXPECT_EQ(ThreadPool::create(0).status().code(), Code::kInvalid);
  EXPECT_EQ(ThreadPool::create(-3).status().code(), Code::kInvalid);
}

TEST(ThreadPool, ASystemWithoutMoreThreadsIsAnErrorAndNoHang) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need the address space";
  ZINF_EXPECT_CHILD_OK([]() -> std::string {
    rlimit limit = {};
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = std::size_t{256} << 20;  // room for a few stacks
    if (setrlimit(RLIMIT_AS, &limit) != 0) return "skip";
    auto pool = ThreadPool::create(4000);
    if (pool.ok()) return "4000 threads fit into 256 MiB";
    return pool.status().text().find("start a thread") == std::string::npos
               ? pool.status().text()
               : "";
  });
}

}  // namespace
}  // namespace zinf
