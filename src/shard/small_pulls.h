// Requests for small slices of one peer that go as one message, and have one
// answer: most parameters of a model are small, and a message costs more than
// their bytes.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "src/base/mutex.h"
#include "src/shard/header.h"
#include "zinf/comm.h"
#include "zinf/move.h"

namespace zinf::shard {

// Thread-safe.
class SmallPulls {
 public:
  static constexpr std::size_t kSliceBytes = std::size_t{32} << 10;
  static constexpr std::size_t kMostBytes = std::size_t{256} << 10;
  static constexpr std::size_t kMost = 64;

  // Before send().
  void add(const Header& request, std::span<std::byte> into);
  bool full() const;
  // Asks the peer, once.
  void send(Comm& comm, int peer);

  // After send(): whether all slices are there; waits for them.
  bool done();
  Status wait();

 private:
  void copy_out() ZINF_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::vector<Header> requests_ ZINF_GUARDED_BY(mutex_);
  std::vector<std::span<std::byte>> into_ ZINF_GUARDED_BY(mutex_);
  std::size_t bytes_ ZINF_GUARDED_BY(mutex_) = 0;
  Header head_ ZINF_GUARDED_BY(mutex_);
  std::vector<std::byte> answer_ ZINF_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Move>> moves_ ZINF_GUARDED_BY(mutex_);
  bool over_ ZINF_GUARDED_BY(mutex_) = false;
  Status outcome_ ZINF_GUARDED_BY(mutex_);
};

// One of them. Whoever needs it makes sure that they are asked for.
class SmallPull final : public Move {
 public:
  SmallPull(std::shared_ptr<SmallPulls> pulls, std::function<void()> ask)
      : pulls_(std::move(pulls)), ask_(std::move(ask)) {}
  ~SmallPull() override { (void)wait(); }

  bool done() override {
    ask_();
    return pulls_->done();
  }
  Status wait() override {
    ask_();
    return pulls_->wait();
  }

 private:
  const std::shared_ptr<SmallPulls> pulls_;
  const std::function<void()> ask_;
};

}  // namespace zinf::shard
