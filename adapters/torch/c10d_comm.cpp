#include "adapters/torch/c10d_comm.h"

#include <ATen/ops/from_blob.h>

#include <deque>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "src/base/mutex.h"
#include "src/base/start_thread.h"
#include "src/base/strf.h"
#include "src/shard/pending.h"

namespace zinf {
namespace {

using shard::Pending;
using shard::PendingMove;

Result<c10::intrusive_ptr<c10d::Backend>> resolve(const std::string& name) {
  try {
    return c10d::resolve_process_group(name)->getBackend(at::kCPU);
  } catch (const std::exception& error) {
    return Status::error(Code::kNotFound, "the process group \"" + name +
                                              "\" is not there (any more): " +
                                              c10::GetExceptionString(error));
  }
}

// The first sentence, without torch's place in its sources.
std::string first_line(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  text = text.substr(0, text.find(". "));
  std::size_t place = text.find("] ");
  return text[0] == '[' && place != std::string::npos ? text.substr(place + 2)
                                                      : text;
}

// gloo's way of waiting blocks, so a thread does it; transfers of one lane with
// one rank are over in their order.
class Waiter {
 public:
  struct Item {
    c10::intrusive_ptr<c10d::Work> work;
    std::shared_ptr<Pending> pending;
  };

  Waiter(int peer, int size) : peer_(peer), size_(size) {}
  ~Waiter() {
    close(Status::error(Code::kCancelled, "this rank has ended"));
    if (thread_.joinable()) thread_.join();
  }

  Status start() {
    return start_thread(thread_, [this] { run(); });
  }

  void add(Item item) {
    Status closed;
    {
      MutexLock lock(mutex_);
      closed = closed_;
      if (closed.ok()) {
        items_.push_back(item);
        wake_.notify_all();
        return;
      }
    }
    item.work->abort();
    item.pending->finish(closed);
  }

  void close(const Status& why) {
    MutexLock lock(mutex_);
    if (!closed_.ok()) return;
    closed_ = why;
    if (waited_for_) waited_for_->abort();
    for (const Item& item : items_) item.work->abort();
    wake_.notify_all();
  }

 private:
  void run() {
    while (true) {
      Item item;
      {
        MutexLock lock(mutex_);
        while (items_.empty() && closed_.ok()) wake_.wait(mutex_);
        if (items_.empty()) return;
        item = std::move(items_.front());
        items_.pop_front();
        waited_for_ = item.work;
      }
      Status outcome = wait_for(*item.work);
      {
        MutexLock lock(mutex_);
        waited_for_.reset();
        if (!closed_.ok()) outcome = closed_;
      }
      item.work.reset();  // whoever waits may destroy the group
      item.pending->finish(std::move(outcome));
    }
  }

  Status wait_for(c10d::Work& work) const {
    try {
      if (work.wait()) return {};
      return Status::error(Code::kCancelled, "given up");
    } catch (const std::exception& error) {
      return rank_is_gone(peer_, size_, first_line(error));
    }
  }

  const int peer_;
  const int size_;
  std::thread thread_;
  Mutex mutex_;
  CondVar wake_;
  std::deque<Item> items_ ZINF_GUARDED_BY(mutex_);
  c10::intrusive_ptr<c10d::Work> waited_for_ ZINF_GUARDED_BY(mutex_);
  Status closed_ ZINF_GUARDED_BY(mutex_);
};

class C10dComm final : public Comm {
 public:
  C10dComm(std::string group, int rank, int size)
      : Comm(rank, size), group_(std::move(group)) {}

  std::string_view backend() const override { return "gloo"; }

  void close(const Status& why) override {
    MutexLock lock(mutex_);
    if (closed_.ok()) closed_ = why;
    for (auto& [way, waiter] : waiters_) waiter->close(why);
  }

 private:
  enum class Direction : std::uint8_t { kSend, kReceive };
  struct Way {
    int peer;
    Lane lane;
    Direction direction;
    auto operator<=>(const Way&) const = default;
  };

  std::unique_ptr<Move> start_send(int to, Lane lane,
                                   std::span<const std::byte> from) override {
    return start({to, lane, Direction::kSend},
                 {const_cast<std::byte*>(from.data()), from.size()});
  }
  std::unique_ptr<Move> start_receive(int from, Lane lane,
                                      std::span<std::byte> into) override {
    return start({from, lane, Direction::kReceive}, into);
  }

  // Under the lock: transfers of a way begin in the order of calls.
  std::unique_ptr<Move> start(const Way& way, std::span<std::byte> memory) {
    MutexLock lock(mutex_);
    if (!closed_.ok()) return finished_move(closed_);
    auto backend = resolve(group_);
    if (!backend.ok()) return finished_move(backend.status());
    auto waiter = waiter_for_locked(way);
    if (!waiter.ok()) return finished_move(waiter.status());
    auto pending = std::make_shared<Pending>();
    try {
      (*waiter)->add({begin(**backend, way, memory), pending});
    } catch (const std::exception& error) {
      return finished_move(rank_is_gone(way.peer, size(), first_line(error)));
    }
    return std::make_unique<PendingMove>(std::move(pending));
  }

  static c10::intrusive_ptr<c10d::Work> begin(c10d::Backend& backend,
                                              const Way& way,
                                              std::span<std::byte> memory) {
    static std::byte nothing{};  // an empty message has one byte
    if (memory.empty()) memory = {&nothing, 1};
    std::vector<at::Tensor> tensors{at::from_blob(
        memory.data(), {static_cast<std::int64_t>(memory.size())}, at::kByte)};
    const int tag = static_cast<int>(way.lane);
    return way.direction == Direction::kSend
               ? backend.send(tensors, way.peer, tag)
               : backend.recv(tensors, way.peer, tag);
  }

  Result<Waiter*> waiter_for_locked(const Way& way) ZINF_REQUIRES(mutex_) {
    if (auto found = waiters_.find(way); found != waiters_.end()) {
      return found->second.get();
    }
    auto waiter = std::make_unique<Waiter>(way.peer, size());
    ZINF_TRY(waiter->start());
    return (waiters_[way] = std::move(waiter)).get();
  }

  const std::string group_;
  Mutex mutex_;
  std::map<Way, std::unique_ptr<Waiter>> waiters_ ZINF_GUARDED_BY(mutex_);
  Status closed_ ZINF_GUARDED_BY(mutex_);
};

}  // namespace

Result<std::unique_ptr<Comm>> make_c10d_comm(const std::string& group_name) {
  ZINF_ASSIGN(auto backend, resolve(group_name));
  return std::unique_ptr<Comm>(std::make_unique<C10dComm>(
      group_name, backend->getRank(), backend->getSize()));
}

}  // namespace zinf
