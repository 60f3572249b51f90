// A few threads that run one range at a time in parallel.
//
// Not OpenMP: torch's wheel brings its own runtime and a second one in the same
// process oversubscribes the cores.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace zinf {

// One at a time: run() may be called from any thread, calls follow each other.
class ThreadPool {
 public:
  // `threads` counts the caller too: ThreadPool(1) starts no thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Calls body(begin, end) over pieces of [0, count), whose bounds are
  // multiples of `grain` (the last one ends at count); returns when all are
  // done. Pieces are contiguous, a few per thread, and which thread runs which
  // is open: a body that treats elements one by one gives the same result for
  // any number of threads. `body` must not throw.
  void run(std::size_t count, std::size_t grain,
           const std::function<void(std::size_t begin, std::size_t end)>& body);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zinf
