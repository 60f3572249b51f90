// A group of threads in one process: messages are copied from memory to memory
// when both ends are there. Small sends do not wait for that, as in a network:
// a copy of them arrives even when the sender is gone.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <thread>
#include <tuple>

#include "src/base/check.h"
#include "src/base/mutex.h"
#include "src/base/strf.h"
#include "src/shard/pending.h"
#include "zinf/comm.h"

namespace zinf {
namespace {

using shard::Pending;
using shard::PendingMove;
using Clock = std::chrono::steady_clock;

// What the ends of a group share.
class Network {
 public:
  Network(int size, const ThreadGroupOptions& options)
      : size_(size), options_(options), closed_(size), gone_(size) {
    if (options.bytes_per_second > 0) thread_ = std::thread([this] { run(); });
  }
  ~Network() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  int size() const { return size_; }

  struct Way {
    int from;
    int to;
    Lane lane;
    bool operator<(const Way& other) const {
      return std::tie(from, to, lane) <
             std::tie(other.from, other.to, other.lane);
    }
  };

  std::shared_ptr<Pending> send(const Way& way,
                                std::span<const std::byte> from) {
    constexpr std::size_t kSmall = 4096;
    if (from.size() > kSmall) {
      return start(way, true,
                   {const_cast<std::byte*>(from.data()), from.size()});
    }
    auto copy =
        std::make_shared<std::vector<std::byte>>(from.begin(), from.end());
    return start(way, true, *copy, copy);
  }
  std::shared_ptr<Pending> receive(const Way& way, std::span<std::byte> into) {
    return start(way, false, into);
  }

  // What this rank has under way, or starts later, fails with this.
  void close(int rank, const Status& why) {
    MutexLock lock(mutex_);
    if (!closed_[rank]) closed_[rank] = why;
    fail_waiting_locked();
  }
  // The others' with it too.
  void leave(int rank) {
    MutexLock lock(mutex_);
    gone_[rank] = true;
    if (!closed_[rank]) {
      closed_[rank] = Status::error(Code::kCancelled, "it has ended");
    }
    fail_waiting_locked();
  }

 private:
  struct End {
    std::shared_ptr<Pending> pending;
    std::span<std::byte> memory;
    std::shared_ptr<void> copy;  // of a small send, which is over already
  };
  // Sends that wait for receives, or the other way round.
  struct Queue {
    std::deque<End> ends;
    bool sends = false;
  };
  struct Transfer {
    End from;
    End to;
  };

  std::shared_ptr<Pending> start(const Way& way, bool sends,
                                 std::span<std::byte> memory,
                                 std::shared_ptr<void> copy = nullptr) {
    End mine{std::make_shared<Pending>(), memory, std::move(copy)};
    std::optional<Transfer> matched;
    {
      MutexLock lock(mutex_);
      Queue& queue = waiting_[way];
      const bool there = !queue.ends.empty() && queue.sends != sends;
      Status refused = closed_[sends ? way.from : way.to].value_or(Status());
      if (refused.ok() && !there) refused = refused_locked(way, sends);
      if (!refused.ok()) {
        mine.pending->finish(refused);
        return mine.pending;
      }
      if (mine.copy != nullptr) mine.pending->finish({});
      matched = match_locked(queue, sends, mine);
      if (matched && options_.bytes_per_second > 0) {
        delay_locked(way, *std::exchange(matched, std::nullopt));
      }
    }
    if (matched) carry_out(*matched);
    return mine.pending;
  }

  static std::optional<Transfer> match_locked(Queue& queue, bool sends,
                                              const End& mine) {
    if (queue.ends.empty() || queue.sends == sends) {
      queue.sends = sends;
      queue.ends.push_back(mine);
      return std::nullopt;
    }
    End other = std::move(queue.ends.front());
    queue.ends.pop_front();
    return sends ? Transfer{mine, other} : Transfer{other, mine};
  }

  // Why one end of a way waits in vain, or ok.
  Status refused_locked(const Way& way, bool sends) ZINF_REQUIRES(mutex_) {
    const int own = sends ? way.from : way.to;
    const int other = sends ? way.to : way.from;
    if (closed_[own]) return *closed_[own];
    if (!gone_[other]) return {};
    return rank_is_gone(other, size_, closed_[other]->text());
  }

  void fail_waiting_locked() ZINF_REQUIRES(mutex_) {
    for (auto& [way, queue] : waiting_) {
      const Status refused = refused_locked(way, queue.sends);
      if (refused.ok()) continue;
      // A small send that has begun arrives, unless a large one is before it.
      auto first = std::ranges::find_if(
          queue.ends, [](const End& end) { return end.copy == nullptr; });
      for (auto end = first; end != queue.ends.end(); ++end) {
        if (end->copy == nullptr) end->pending->finish(refused);
      }
      queue.ends.erase(first, queue.ends.end());
    }
  }

  static void carry_out(const Transfer& transfer) {
    std::span<std::byte> from = transfer.from.memory;
    std::span<std::byte> to = transfer.to.memory;
    Status outcome;
    if (from.size() != to.size()) {
      outcome = Status::error(Code::kInvalid,
                              strf("a message of %zu bytes, %zu were expected",
                                   from.size(), to.size()));
    } else if (!from.empty()) {
      std::memcpy(to.data(), from.data(), from.size());
    }
    transfer.to.pending->finish(outcome);
    if (transfer.from.copy == nullptr) transfer.from.pending->finish(outcome);
  }

  void delay_locked(const Way& way, Transfer transfer) ZINF_REQUIRES(mutex_) {
    Clock::time_point& free = free_[{way.from, way.to}];
    const std::chrono::duration<double> takes(
        static_cast<double>(transfer.from.memory.size()) /
        options_.bytes_per_second);
    free = std::max(free, Clock::now()) +
           std::chrono::duration_cast<Clock::duration>(takes);
    delayed_.emplace(free, std::move(transfer));
    changed_.notify_all();
  }

  void run() {
    mutex_.lock();
    while (true) {
      if (delayed_.empty()) {
        if (stopping_) break;
        changed_.wait(mutex_);
        continue;
      }
      auto first = delayed_.begin();
      const auto left = first->first - Clock::now();
      if (left > Clock::duration::zero()) {
        changed_.wait_for(mutex_, left);
        continue;
      }
      Transfer transfer = std::move(first->second);
      delayed_.erase(first);
      mutex_.unlock();
      carry_out(transfer);
      mutex_.lock();
    }
    mutex_.unlock();
  }

  const int size_;
  const ThreadGroupOptions options_;
  Mutex mutex_;
  CondVar changed_;
  std::map<Way, Queue> waiting_ ZINF_GUARDED_BY(mutex_);
  std::vector<std::optional<Status>> closed_ ZINF_GUARDED_BY(mutex_);  // why
  std::vector<bool> gone_ ZINF_GUARDED_BY(mutex_);
  // When a link has moved what it has.
  std::map<std::pair<int, int>, Clock::time_point> free_
      ZINF_GUARDED_BY(mutex_);
  std::multimap<Clock::time_point, Transfer> delayed_ ZINF_GUARDED_BY(mutex_);
  bool stopping_ ZINF_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class ThreadComm final : public Comm {
 public:
  ThreadComm(std::shared_ptr<Network> network, int rank)
      : Comm(rank, network->size()), network_(std::move(network)) {}
  ~ThreadComm() override { network_->leave(rank()); }

  std::string_view backend() const override { return "threads"; }
  void close(const Status& why) override { network_->close(rank(), why); }

 private:
  std::unique_ptr<Move> start_send(int to, Lane lane,
                                   std::span<const std::byte> from) override {
    return std::make_unique<PendingMove>(
        network_->send({rank(), to, lane}, from));
  }
  std::unique_ptr<Move> start_receive(int from, Lane lane,
                                      std::span<std::byte> into) override {
    return std::make_unique<PendingMove>(
        network_->receive({from, rank(), lane}, into));
  }

  const std::shared_ptr<Network> network_;
};

}  // namespace

std::vector<std::unique_ptr<Comm>> make_thread_group(
    int size, const ThreadGroupOptions& options) {
  ZINF_CHECK(size > 0, "a group of %d", size);
  auto network = std::make_shared<Network>(size, options);
  std::vector<std::unique_ptr<Comm>> ends;
  for (int rank = 0; rank < size; ++rank) {
    ends.push_back(std::make_unique<ThreadComm>(network, rank));
  }
  return ends;
}

}  // namespace zinf
