#include "src/base/task_thread.h"

#include <utility>

#include "src/base/start_thread.h"

namespace zinf {

TaskThread::~TaskThread() {
  {
    MutexLock lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void TaskThread::add(std::function<void()> task) {
  bool started = false;
  {
    MutexLock lock(mutex_);
    if (!started_) started_ = start_thread(thread_, [this] { work(); }).ok();
    started = started_;
    if (started) tasks_.push_back(std::move(task));
  }
  if (started) {
    changed_.notify_one();
  } else {
    task();
  }
}

void TaskThread::work() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(mutex_);
      while (tasks_.empty() && !ending_) changed_.wait(mutex_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace zinf
