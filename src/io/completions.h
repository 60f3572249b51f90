// Finished operations on their way to the pump, for drivers without a ring.
#pragma once

#include <chrono>
#include <vector>

#include "src/base/mutex.h"
#include "src/io/driver.h"

namespace zinf::io {

// Thread-safe; collect() on one thread.
class Completions {
 public:
  void add(RawOp* op) {
    MutexLock lock(mutex_);
    finished_.push_back(op);
    changed_.notify_one();
  }

  void wake() {
    MutexLock lock(mutex_);
    woken_ = true;
    changed_.notify_one();
  }

  // As Driver::collect.
  void collect(std::vector<RawOp*>& finished,
               std::chrono::nanoseconds timeout) {
    MutexLock lock(mutex_);
    while (finished_.empty() && !woken_) {
      if (timeout == kForever) {
        changed_.wait(mutex_);
      } else if (!changed_.wait_for(mutex_, timeout)) {
        break;
      }
    }
    woken_ = false;
    finished.insert(finished.end(), finished_.begin(), finished_.end());
    finished_.clear();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<RawOp*> finished_ ZINF_GUARDED_BY(mutex_);
  bool woken_ ZINF_GUARDED_BY(mutex_) = false;
};

}  // namespace zinf::io
