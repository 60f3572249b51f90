// A few threads that run one range at a time in parallel.
//
// Not OpenMP: torch's wheel brings its own runtime and a second one in the same
// process oversubscribes the cores.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "zinf/status.h"

namespace zinf {

// One at a time: run() may be called from any thread, calls follow each other.
class ThreadPool {
 public:
  // `threads` counts the caller too: with 1 no thread is started. kInvalid for
  // less than 1; the system's error when it gives no more threads.
  static Result<std::unique_ptr<ThreadPool>> create(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Calls body(begin, end) over pieces of [0, count), whose bounds are
  // multiples of `grain` (the last one ends at count); returns when all are
  // done. Pieces are contiguous, a few per thread, and which thread runs which
  // is open: a body that treats elements one by one gives the same result for
  // any number of threads. `body` must not throw, nor call run() of the same
  // pool.
  void run(std::size_t count, std::size_t grain,
           const std::function<void(std::size_t begin, std::size_t end)>& body);

 private:
  class Impl;
  explicit ThreadPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zinf
