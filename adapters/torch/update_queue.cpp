#include "adapters/torch/update_queue.h"

#include <algorithm>
#include <exception>
#include <future>
#include <vector>

#include "adapters/torch/later_update.h"
#include "zinf/log.h"

namespace zinf {
namespace {

constexpr std::size_t kAhead =
    2;  // whose gradients and states are on their way

}  // namespace

UpdateQueue& UpdateQueue::instance() {
  static auto* queue = new UpdateQueue();
  return *queue;
}

void UpdateQueue::add(const std::shared_ptr<LaterUpdate>& update) {
  bool soon = false;
  {
    std::lock_guard lock(mutex_);
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
  for (const auto& update : next) {
    if (update != nullptr) update->prepare();
  }
  try {
    if (next[0] != nullptr) next[0]->run();
  } catch (const std::exception& error) {  // whoever uses the weight is told
    log(LogLevel::kDebug, "an update waits on: %s", error.what());
  }
}

void UpdateQueue::wait() {
  std::promise<void> done;
  thread_.add([&done] { done.set_value(); });
  done.get_future().wait();
}

}  // namespace zinf
