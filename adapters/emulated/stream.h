// The streams of the emulated device: queues of work, each with a thread of its
// own, and what orders them.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "src/base/mutex.h"
#include "zinf/status.h"

namespace zinf::emulated {

// How slow the device is. Results must not depend on it.
struct Pace {
  // Every task starts late by up to this much, at random.
  std::chrono::microseconds max_delay{0};
  std::uint64_t seed = 0;
  // 0: as fast as it goes.
  double to_device_bytes_per_second = 0;
  double to_host_bytes_per_second = 0;
  double flops_per_second = 0;
};

// What a stream did, on the clock of steady_clock.
struct Span {
  std::string name;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

// Thread-safe. Does its tasks one after the other, in the order of enqueue().
class Stream {
 public:
  // Of a task: 1 is the first, 0 was done before all.
  using Ticket = std::uint64_t;

  static Result<std::unique_ptr<Stream>> create(std::uint64_t number);

  // What is queued is still done.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // The task takes `least` at least, counted from its start. What it throws is
  // kept for check().
  Ticket enqueue(std::string name, std::function<void()> task,
                 std::chrono::nanoseconds least = {}) ZINF_EXCLUDES(mutex_);

  Ticket last() const ZINF_EXCLUDES(mutex_);
  bool done(Ticket ticket) const ZINF_EXCLUDES(mutex_);
  void wait(Ticket ticket) ZINF_EXCLUDES(mutex_);

  // Throws what the first failed task since the last call has thrown.
  void check() ZINF_EXCLUDES(mutex_);

  void set_pace(const Pace& pace) ZINF_EXCLUDES(mutex_);

  // From now on spans are kept, or no longer; returns those until now.
  std::vector<Span> trace(bool on) ZINF_EXCLUDES(mutex_);

 private:
  struct Task {
    std::string name;
    std::function<void()> run;
    std::chrono::nanoseconds least;
  };

  explicit Stream(std::uint64_t number) : number_(number) {}
  void work() ZINF_EXCLUDES(mutex_);
  void run(Task& task, std::chrono::nanoseconds delay) ZINF_EXCLUDES(mutex_);

  const std::uint64_t number_;
  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::deque<Task> tasks_ ZINF_GUARDED_BY(mutex_);
  Ticket enqueued_ ZINF_GUARDED_BY(mutex_) = 0;
  Ticket done_ ZINF_GUARDED_BY(mutex_) = 0;
  bool closing_ ZINF_GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ ZINF_GUARDED_BY(mutex_);
  std::chrono::microseconds max_delay_ ZINF_GUARDED_BY(mutex_){0};
  std::mt19937_64 random_ ZINF_GUARDED_BY(mutex_);
  bool tracing_ ZINF_GUARDED_BY(mutex_) = false;
  std::vector<Span> spans_ ZINF_GUARDED_BY(mutex_);
  // By name, the last time; for the stream's thread alone.
  std::unordered_map<std::string, std::chrono::nanoseconds> took_;
  std::thread thread_;
};

// A place in a stream's queue.
struct Mark {
  Stream* stream = nullptr;  // null: done
  Stream::Ticket ticket = 0;

  bool done() const { return stream == nullptr || stream->done(ticket); }
  void wait() const {
    if (stream != nullptr) stream->wait(ticket);
  }
};

// All that was enqueued until now.
inline Mark mark(Stream& stream) { return {&stream, stream.last()}; }

// What `stream` gets from now on waits for the mark.
void hold(Stream& stream, const Mark& until);

}  // namespace zinf::emulated
