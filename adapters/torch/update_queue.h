// Updates, on the host, of weights that are on a device.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

#include "src/base/task_thread.h"

namespace zinf {

class LaterUpdate;

// A thread makes updates that were put off (later_update.h) in the order in
// which they come, while the device computes; whoever needs one earlier makes
// it. The gradients and states of the next ones are on their way meanwhile.
//
// Thread-safe. One for the process, so that an engine may end in its thread.
class UpdateQueue {
 public:
  static UpdateQueue& instance();

  void add(const std::shared_ptr<LaterUpdate>& update);
  // Until all that was added is over, or waits for memory. Not in its thread.
  void wait();

 private:
  UpdateQueue() = default;
  void run_next();

  std::mutex mutex_;  // for what follows
  bool used_ = false;
  std::deque<std::weak_ptr<LaterUpdate>> waiting_;

  TaskThread thread_;
};

}  // namespace zinf
