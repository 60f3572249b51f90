#include "src/shard/small_pulls.h"

#include <algorithm>
#include <cstring>

namespace zinf::shard {

void SmallPulls::add(const Header& request, std::span<std::byte> into) {
  MutexLock lock(mutex_);
  requests_.push_back(request);
  into_.push_back(into);
  bytes_ += into.size();
}

bool SmallPulls::full() const {
  MutexLock lock(mutex_);
  return requests_.size() >= kMost || bytes_ >= kMostBytes;
}

void SmallPulls::send(Comm& comm, int peer) {
  MutexLock lock(mutex_);
  answer_.resize(bytes_);
  head_ = {.kind = Kind::kPulls, .number = requests_.size(), .bytes = bytes_};
  moves_.push_back(comm.receive(peer, Lane::kWeights, answer_));
  moves_.push_back(comm.send(peer, Lane::kRequests, bytes_of(head_)));
  moves_.push_back(
      comm.send(peer, Lane::kRequests, std::as_bytes(std::span(requests_))));
}

bool SmallPulls::done() {
  MutexLock lock(mutex_);
  if (over_) return true;
  if (!std::ranges::all_of(moves_, [](auto& move) { return move->done(); })) {
    return false;
  }
  copy_out();
  return true;
}

Status SmallPulls::wait() {
  MutexLock lock(mutex_);
  if (!over_) copy_out();
  return outcome_;
}

void SmallPulls::copy_out() {
  for (const auto& move : moves_) {
    Status status = move->wait();
    if (outcome_.ok()) outcome_ = status;
  }
  over_ = true;
  if (!outcome_.ok()) return;
  std::size_t at = 0;
  for (std::span<std::byte> into : into_) {
    std::memcpy(into.data(), &answer_[at], into.size());
    at += into.size();
  }
}

}  // namespace zinf::shard
