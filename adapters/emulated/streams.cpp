#include "adapters/emulated/streams.h"

namespace zinf::emulated {
namespace {

thread_local Streams::Id current_id = 0;

}  // namespace

Result<std::unique_ptr<Streams>> Streams::create() {
  std::unique_ptr<Streams> made(new Streams);
  for (Id id = 0; id < kStreams; ++id) {
    ZINF_ASSIGN(made->streams_[id], Stream::create(id));
  }
  return made;
}

Streams::Id Streams::next() { return 1 + given_++ % (kStreams - 1); }

Streams::Id Streams::current() { return current_id; }

Streams::Id Streams::exchange_current(Id id) {
  return std::exchange(current_id, id);
}

void Streams::wait_all() {
  for (auto& stream : streams_) stream->wait(stream->last());
}

void Streams::synchronize() {
  wait_all();
  for (auto& stream : streams_) stream->check();
}

void Streams::set_pace(const Pace& pace) {
  for (auto& stream : streams_) stream->set_pace(pace);
  MutexLock lock(mutex_);
  pace_ = pace;
}

Pace Streams::pace() const {
  MutexLock lock(mutex_);
  return pace_;
}

std::vector<std::vector<Span>> Streams::trace(bool on) {
  std::vector<std::vector<Span>> spans;
  for (auto& stream : streams_) spans.push_back(stream->trace(on));
  return spans;
}

std::chrono::nanoseconds time_for(double amount, double per_second) {
  if (per_second <= 0) return {};
  return std::chrono::nanoseconds(
      static_cast<std::int64_t>(amount / per_second * 1e9));
}

}  // namespace zinf::emulated
