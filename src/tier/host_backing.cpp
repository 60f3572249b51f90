// A device's memory above the host's.
#include <functional>
#include <memory>
#include <utility>

#include "src/base/mutex.h"
#include "src/base/task_thread.h"
#include "zinf/residency.h"

namespace zinf {
namespace {

// A copy that a thread of the tier's makes. Whoever waits for one that is read
// makes it, if that is earlier: what the thread is at may have to wait for
// others. Writes keep their order: a device has their contents in it.
enum class Order : std::uint8_t { kAny, kKept };

class Copy {
 public:
  Copy(std::function<Status()> copy, Order order)
      : copy_(std::move(copy)), order_(order) {}

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
    bool kept = order_ == Order::kKept;
    while (waits &&
           (stage_ == Stage::kRunning || (kept && stage_ == Stage::kQueued))) {
      changed_.wait(mutex_);
    }
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
  const Order order_;
  mutable Mutex mutex_;
  CondVar changed_;
  Stage stage_ ZINF_GUARDED_BY(mutex_) = Stage::kQueued;
  Status status_ ZINF_GUARDED_BY(mutex_);
};

// The thread may come to it when nobody waits any more.
class BackgroundMove final : public Move {
 public:
  BackgroundMove(TaskThread& thread, Order order, std::function<Status()> copy)
      : move_(std::make_shared<Copy>(std::move(copy), order)) {
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
  HostBacking(Residency& host, DeviceCopies copies, AddState add,
              Residency* wholes)
      : host_(host),
        wholes_(wholes),
        copies_(std::move(copies)),
        add_(std::move(add)) {}

  Result<std::uint32_t> add(const StateSpec& spec) override {
    ZINF_ASSIGN(HostState added, add_(spec));
    return added.state.index | (added.whole ? kWhole : 0);
  }
  Status remove(std::uint32_t state) override {
    if (!is_whole(state)) host_.remove({state});
    return {};
  }
  void rename(std::uint32_t state, const std::string& unit) override {
    tier_of(state).rename(ref_of(state), unit);
  }
  // The next write replaces it, which heals.
  Status discard(std::uint32_t) override { return {}; }
  bool has_content(std::uint32_t state) const override {
    return tier_of(state).place(ref_of(state)) != Place::kEmpty;
  }
  std::unique_ptr<Move> read(std::uint32_t state,
                             std::span<std::byte> into) override {
    tier_of(state).prefetch(ref_of(state));
    return std::make_unique<BackgroundMove>(
        in_, Order::kAny, [this, state, into]() -> Status {
          ZINF_ASSIGN(Pin pin, tier_of(state).pin(ref_of(state), Use::kRead));
          return copies_.to_device(into, pin.bytes());
        });
  }
  std::unique_ptr<Move> write(std::uint32_t state,
                              std::span<const std::byte> from) override {
    return std::make_unique<BackgroundMove>(
        out_, Order::kKept, [this, state, from]() -> Status {
          {
            ZINF_ASSIGN(Pin pin,
                        tier_of(state).pin(ref_of(state), Use::kReplace));
            ZINF_TRY(copies_.to_host(pin.bytes(), from));
          }
          if (is_whole(state)) wholes_->write(ref_of(state));
          return {};
        });
  }
  bool due(std::uint64_t step) const override { return host_.due(step); }
  Status commit(std::uint64_t step) override { return host_.commit(step); }
  Status rollback() override { return host_.rollback(); }

 private:
  // Beside the number of a state.
  static constexpr std::uint32_t kWhole = std::uint32_t{1} << 31;
  static bool is_whole(std::uint32_t state) { return (state & kWhole) != 0; }
  static StateRef ref_of(std::uint32_t state) { return {state & ~kWhole}; }
  Residency& tier_of(std::uint32_t state) const {
    return is_whole(state) ? *wholes_ : host_;
  }

  Residency& host_;
  Residency* const wholes_;
  const DeviceCopies copies_;
  const AddState add_;
  TaskThread in_;  // the last: their threads use what is above
  TaskThread out_;
};

}  // namespace

std::shared_ptr<Backing> host_backing(Residency& host, DeviceCopies copies,
                                      AddState add, Residency* wholes) {
  if (!add) {
    Home home = host.has_backing() ? Home::kBelow : Home::kMemory;
    add = [&host, home](const StateSpec& spec) -> Result<HostState> {
      ZINF_ASSIGN(StateRef state, host.add(spec, home));
      return HostState{state};
    };
  }
  return std::make_shared<HostBacking>(host, std::move(copies), std::move(add),
                                       wholes);
}

}  // namespace zinf
