#include "adapters/torch/update_queue.h"

#include <algorithm>
#include <exception>
#include <future>
#include <vector>

#include "adapters/torch/later_update.h"
#include "zinf/log.h"

namespace zinf {
namespace {

// Whose gradients and states are on their way.
constexpr std::size_t kAhead = 2;

}  // namespace

UpdateQueue& UpdateQueue::instance() {
  static auto* queue = new UpdateQueue();
  return *queue;
}

void UpdateQueue::add(const std::shared_ptr<LaterUpdate>& update) {
  bool soon = false;
  {
    std::lock_guard lock(mutex_);
    used_ = true;
    waiting_.push_back(update);
    soon = waiting_.size() <= kAhead;
  }
  if (soon) update->prepare();
  thread_.add([this] { run_next(); });
}

void UpdateQueue::run_next() {
  std::vector<std::shared_ptr<LaterUpdate>> next;
  {
    std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < std::min(kAhead + 1, waiting_.size()); ++i) {
      next.push_back(waiting_[i].lock());
    }
    waiting_.pop_front();
  }
  try {
    for (const auto& update : next) {
      if (update != nullptr) update->prepare();
    }
    if (next[0] != nullptr) next[0]->run();
  } catch (const std::exception& error) {  // whoever uses the weight is told
    log(LogLevel::kDebug, "an update waits on: %s", error.what());
  }
}

void UpdateQueue::wait() {
  {
    std::lock_guard lock(mutex_);
    if (!used_) return;
  }
  std::promise<void> done;
  thread_.add([&done] { done.set_value(); });
  done.get_future().wait();
}

}  // namespace zinf
