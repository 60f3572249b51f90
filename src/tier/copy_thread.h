// A thread that does one thing after the other.
#pragma once

#include <deque>
#include <functional>
#include <thread>

#include "src/base/mutex.h"

namespace zinf {

// Thread-safe. The thread starts with the first task; where the system allows
// none, add() does the task itself.
class CopyThread {
 public:
  CopyThread() = default;
  ~CopyThread();  // what is queued is done first
  CopyThread(const CopyThread&) = delete;
  CopyThread& operator=(const CopyThread&) = delete;

  void add(std::function<void()> task) ZINF_EXCLUDES(mutex_);

 private:
  void work() ZINF_EXCLUDES(mutex_);

  Mutex mutex_;
  CondVar changed_;
  bool ending_ ZINF_GUARDED_BY(mutex_) = false;
  bool started_ ZINF_GUARDED_BY(mutex_) = false;
  std::deque<std::function<void()>> tasks_ ZINF_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace zinf
