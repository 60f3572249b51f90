// A transfer that another thread ends.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "zinf/move.h"

namespace zinf::shard {

class Pending {
 public:
  // Once.
  void finish(Status outcome) {
    outcome_ = std::move(outcome);
    done_.store(true, std::memory_order_release);
    done_.notify_all();
  }
  bool done() const { return done_.load(std::memory_order_acquire); }
  Status wait() const {
    done_.wait(false, std::memory_order_acquire);
    return outcome_;
  }

 private:
  std::atomic<bool> done_ = false;
  Status outcome_;  // when done_
};

// For whoever has started it.
class PendingMove final : public Move {
 public:
  explicit PendingMove(std::shared_ptr<Pending> pending)
      : pending_(std::move(pending)) {}
  ~PendingMove() override { (void)pending_->wait(); }
  bool done() override { return pending_->done(); }
  Status wait() override { return pending_->wait(); }

 private:
  const std::shared_ptr<Pending> pending_;
};

}  // namespace zinf::shard
