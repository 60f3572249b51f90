// A thread that does one thing after the other.
#pragma once

#include <deque>
#include <functional>
#include <thread>

#include "src/base/mutex.h"

namespace zinf {

// Thread-safe. The thread starts with the first task; where the system allows
// none, add() does the task itself.
class TaskThread {
 public:
  TaskThread() = default;
  ~TaskThread();  // what is queued is done first
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

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
