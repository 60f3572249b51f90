// A device's memory above the host's.
#include <functional>
#include <memory>
#include <utility>

#include "src/base/mutex.h"
#include "src/tier/copy_thread.h"
#include "zinf/residency.h"

namespace zinf {
namespace {

// A copy that a thread of the tier's makes, or whoever waits for it, if that is
// earlier.
class Copy {
 public:
  explicit Copy(std::function<Status()> copy) : copy_(std::move(copy)) {}

  bool done() const {
    MutexLock lock(mutex_);
    return stage_ == Stage::kDone;
  }

  // By the thread. A copy for which there is no room on the host is left to
  // somebody who needs it: others may have given some back by then.
  void try_now() {
    if (!begin(Who::kThread)) return;
    Status status = copy_();
    bool refused = status.code() == Code::kOverBudget;
    end(refused ? Stage::kRefused : Stage::kDone, std::move(status));
  }

  Status wait() {
    if (begin(Who::kWaiter)) end(Stage::kDone, copy_());
    MutexLock lock(mutex_);
    return status_;
  }

 private:
  enum class Stage : std::uint8_t { kQueued, kRunning, kRefused, kDone };

  enum class Who : std::uint8_t { kThread, kWaiter };

  // False when it is over, or somebody else's: who waits, waits for that, and
  // tries again what was refused.
  bool begin(Who who) {
    MutexLock lock(mutex_);
    bool waits = who == Who::kWaiter;
    while (waits && stage_ == Stage::kRunning) changed_.wait(mutex_);
    bool mine =
        stage_ == Stage::kQueued || (waits && stage_ == Stage::kRefused);
    if (mine) stage_ = Stage::kRunning;
    return mine;
  }

  void end(Stage stage, Status status) {
    {
      MutexLock lock(mutex_);
      stage_ = stage;
      status_ = std::move(status);
    }
    changed_.notify_all();
  }

  const std::function<Status()> copy_;
  mutable Mutex mutex_;
  CondVar changed_;
  Stage stage_ ZINF_GUARDED_BY(mutex_) = Stage::kQueued;
  Status status_ ZINF_GUARDED_BY(mutex_);
};

// The thread may come to it when nobody waits any more.
class BackgroundMove final : public Move {
 public:
  BackgroundMove(CopyThread& thread, std::function<Status()> copy)
      : move_(std::make_shared<Copy>(std::move(copy))) {
    thread.add([move = move_] { move->try_now(); });
  }
  ~BackgroundMove() override { (void)wait(); }
  bool done() override { return move_->done(); }
  Status wait() override { return move_->wait(); }

 private:
  std::shared_ptr<Copy> move_;
};

class HostBacking final : public Backing {
 public:
  HostBacking(Residency& host, DeviceCopies copies, AddState add)
      : host_(host), copies_(std::move(copies)), add_(std::move(add)) {}

  Result<std::uint32_t> add(const StateSpec& spec) override {
    ZINF_ASSIGN(StateRef ref, add_(spec));
    return ref.index;
  }
  Status remove(std::uint32_t state) override {
    host_.remove({state});
    return {};
  }
  void rename(std::uint32_t state, const std::string& unit) override {
    host_.rename({state}, unit);
  }
  // The next write replaces it, which heals.
  Status discard(std::uint32_t) override { return {}; }
  bool has_content(std::uint32_t state) const override {
    return host_.place({state}) != Place::kEmpty;
  }
  std::unique_ptr<Move> read(std::uint32_t state,
                             std::span<std::byte> into) override {
    host_.prefetch({state});
    return std::make_unique<BackgroundMove>(
        in_, [this, state, into]() -> Status {
          ZINF_ASSIGN(Pin pin, host_.pin({state}, Use::kRead));
          return copies_.to_device(into, pin.bytes());
        });
  }
  std::unique_ptr<Move> write(std::uint32_t state,
                              std::span<const std::byte> from) override {
    return std::make_unique<BackgroundMove>(
        out_, [this, state, from]() -> Status {
          ZINF_ASSIGN(Pin pin, host_.pin({state}, Use::kReplace));
          return copies_.to_host(pin.bytes(), from);
        });
  }
  bool due(std::uint64_t step) const override { return host_.due(step); }
  Status commit(std::uint64_t step) override { return host_.commit(step); }
  Status rollback() override { return host_.rollback(); }

 private:
  Residency& host_;
  const DeviceCopies copies_;
  const AddState add_;
  CopyThread in_;  // the last: their threads use what is above
  CopyThread out_;
};

}  // namespace

std::shared_ptr<Backing> host_backing(Residency& host, DeviceCopies copies,
                                      AddState add) {
  if (!add) {
    Home home = host.has_backing() ? Home::kBelow : Home::kMemory;
    add = [&host, home](const StateSpec& spec) { return host.add(spec, home); };
  }
  return std::make_shared<HostBacking>(host, std::move(copies), std::move(add));
}

}  // namespace zinf
