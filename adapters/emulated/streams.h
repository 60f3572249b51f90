// The streams that the process has on the emulated device.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "adapters/emulated/stream.h"

namespace zinf::emulated {

// Thread-safe. Stream 0 is the default one; the others are given out in turn.
class Streams {
 public:
  static constexpr std::size_t kStreams = 9;
  using Id = std::size_t;

  static Result<std::unique_ptr<Streams>> create();

  Stream& get(Id id) { return *streams_[id]; }
  Id next();

  // Of the calling thread; the default one at first.
  static Id current();
  static Id exchange_current(Id id);
  Stream& current_stream() { return get(current()); }

  // Waits until nothing is left to do.
  void wait_all();
  // wait_all(), then throws the first error of a task.
  void synchronize();

  void set_pace(const Pace& pace) ZINF_EXCLUDES(mutex_);
  Pace pace() const ZINF_EXCLUDES(mutex_);

  // See Stream::trace(); by stream.
  std::vector<std::vector<Span>> trace(bool on);

 private:
  Streams() = default;

  std::array<std::unique_ptr<Stream>, kStreams> streams_;
  std::atomic<std::size_t> given_{0};
  mutable Mutex mutex_;
  Pace pace_ ZINF_GUARDED_BY(mutex_);
};

// How long a move or a computation takes at a rate; nothing at rate 0.
std::chrono::nanoseconds time_for(double amount, double per_second);

}  // namespace zinf::emulated
