#include "adapters/emulated/stream.h"

#include <utility>

#include "src/base/start_thread.h"

namespace zinf::emulated {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

}  // namespace

Result<std::unique_ptr<Stream>> Stream::create(std::uint64_t number) {
  std::unique_ptr<Stream> stream(new Stream(number));
  Stream* self = stream.get();
  ZINF_TRY(start_thread(stream->thread_, [self] { self->work(); }));
  return stream;
}

Stream::~Stream() {
  {
    MutexLock lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Stream::Ticket Stream::enqueue(std::string name, std::function<void()> task,
                               std::chrono::nanoseconds least) {
  Ticket ticket = 0;
  {
    MutexLock lock(mutex_);
    tasks_.push_back({std::move(name), std::move(task), least});
    ticket = ++enqueued_;
  }
  changed_.notify_all();
  return ticket;
}

Stream::Ticket Stream::last() const {
  MutexLock lock(mutex_);
  return enqueued_;
}

bool Stream::done(Ticket ticket) const {
  MutexLock lock(mutex_);
  return done_ >= ticket;
}

void Stream::wait(Ticket ticket) {
  MutexLock lock(mutex_);
  while (done_ < ticket) changed_.wait(mutex_);
}

void Stream::check() {
  std::exception_ptr failure;
  {
    MutexLock lock(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure) std::rethrow_exception(failure);
}

void Stream::set_pace(const Pace& pace) {
  MutexLock lock(mutex_);
  max_delay_ = pace.max_delay;
  random_.seed(pace.seed * 1'000'003 + number_);
}

std::vector<Span> Stream::trace(bool on) {
  MutexLock lock(mutex_);
  tracing_ = on;
  return std::exchange(spans_, {});
}

void Stream::work() {
  while (true) {
    Task task;
    std::chrono::microseconds delay{0};
    {
      MutexLock lock(mutex_);
      while (tasks_.empty() && !closing_) changed_.wait(mutex_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
      if (max_delay_.count() > 0) {
        auto range = static_cast<std::uint64_t>(max_delay_.count()) + 1;
        delay = std::chrono::microseconds(random_() % range);
      }
    }
    run(task, delay);
    task = {};  // what it holds goes before anyone takes it for done
    {
      MutexLock lock(mutex_);
      ++done_;
    }
    changed_.notify_all();
  }
}

void Stream::run(Task& task, std::chrono::nanoseconds delay) {
  if (delay.count() > 0) std::this_thread::sleep_for(delay);
  Clock::time_point begin = Clock::now();
  // It reads and writes late, so that who does not wait for it sees nothing.
  std::chrono::nanoseconds& took = took_[task.name];
  std::this_thread::sleep_until(begin + task.least - took);
  Clock::time_point start = Clock::now();
  std::exception_ptr failure;
  try {
    task.run();
  } catch (...) {
    failure = std::current_exception();
  }
  took = Clock::now() - start;
  std::this_thread::sleep_until(begin + task.least);
  MutexLock lock(mutex_);
  if (failure && !failure_) failure_ = failure;
  if (tracing_ && !task.name.empty()) {
    spans_.push_back(
        {std::move(task.name), nanoseconds(begin), nanoseconds(Clock::now())});
  }
}

void hold(Stream& stream, const Mark& until) {
  if (until.stream == &stream || until.done()) return;
  stream.enqueue("", [until] { until.wait(); });
}

}  // namespace zinf::emulated
