// Brings states into memory ahead of their uses, and out of it behind them.
//
// Uses are announced as they happen. The first step is recorded; from then on
// a plan for what is expected next (zinf/plan.h) is carried out by a thread of
// the mover's own, while the caller computes. Nothing depends on it: a state
// that is not there is fetched by whoever pins it, and a plan that does not fit
// costs time, not results. (Its thread asks the owners of states before they
// leave memory, as any thread does that needs room.)
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "src/base/mutex.h"
#include "zinf/host_tier.h"
#include "zinf/plan.h"
#include "zinf/residency.h"
#include "zinf/trace_book.h"

namespace zinf {

// Memory for states: the limit, and what others take of it.
struct Room {
  std::uint64_t limit_bytes = 0;
  std::uint64_t taken_bytes = 0;
};

// Thread-safe.
class Mover {
 public:
  struct Options {
    std::function<Room()> room;       // now
    std::function<DiskSpeed()> disk;  // positive
  };
  // The residency must outlive it.
  static Result<std::unique_ptr<Mover>> create(Residency& residency,
                                               Options options);
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // States that are used at once, before they are pinned.
  void use(std::span<const StateUse> at_once);
  // Others take so much now, before the next use.
  void note_taken(std::uint64_t bytes);
  // Others need memory now: no moves are started before the next use.
  void hold_back();
  void end_step();
  // While it is not active nothing is recorded, and nothing moved ahead; waits
  // for the move that is being started.
  void set_active(bool active);

  MoverStats stats() const;

 private:
  using Clock = std::chrono::steady_clock;
  // For one known trace.
  struct Planned {
    std::optional<Plan> plan;
    std::vector<std::uint64_t> taken_bytes;  // that it counts on, by position
    std::uint64_t steps = 0;                 // that followed it
  };
  // What is to be done before the state is used again.
  struct Task {
    Action action;
    std::uint64_t seen = 0;  // uses of the state before
  };

  Mover(Residency& residency, Options options)
      : residency_(residency), options_(std::move(options)) {}

  void note_time() ZINF_REQUIRES(mutex_);
  void note_taken_locked(std::uint64_t bytes) ZINF_REQUIRES(mutex_);
  void give_tasks(std::size_t position) ZINF_REQUIRES(mutex_);
  void tell_next_uses(std::span<const StateUse> at_once) ZINF_REQUIRES(mutex_);
  bool plan_is_due(const Planned& planned) const ZINF_REQUIRES(mutex_);
  void make_plan(Planned& planned) ZINF_REQUIRES(mutex_);
  std::uint64_t& seen(std::uint32_t state) ZINF_REQUIRES(mutex_);

  void end_step_locked() ZINF_REQUIRES(mutex_);
  // One that is still wanted: next_task() waits for it, until the end.
  std::optional<Task> next_task();
  std::optional<Task> task_at_hand();
  std::optional<Task> take_task_locked() ZINF_REQUIRES(mutex_);
  void carry_out(const Task& task);
  void run();

  Residency& residency_;
  const Options options_;

  mutable Mutex mutex_;
  CondVar wake_;
  bool stopping_ ZINF_GUARDED_BY(mutex_) = false;
  bool active_ ZINF_GUARDED_BY(mutex_) = true;
  bool busy_ ZINF_GUARDED_BY(mutex_) = false;     // the thread, with a task
  bool pressed_ ZINF_GUARDED_BY(mutex_) = false;  // others need memory now
  CondVar idle_;
  TraceBook book_ ZINF_GUARDED_BY(mutex_);
  std::unordered_map<std::uint64_t, Planned> plans_ ZINF_GUARDED_BY(mutex_);
  std::deque<Task> tasks_ ZINF_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> seen_ ZINF_GUARDED_BY(mutex_);  // by state
  std::uint64_t now_ ZINF_GUARDED_BY(mutex_) = 0;  // positions ever announced
  // Of this step, at each position: compute, and what others took.
  std::vector<double> seconds_ ZINF_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> taken_ ZINF_GUARDED_BY(mutex_);
  std::uint64_t limit_ ZINF_GUARDED_BY(mutex_) = 0;
  Clock::time_point last_ ZINF_GUARDED_BY(mutex_);
  std::uint64_t last_wait_ns_ ZINF_GUARDED_BY(mutex_) = 0;
  MoverStats stats_ ZINF_GUARDED_BY(mutex_);

  std::thread thread_;  // the last: it uses what is above
};

}  // namespace zinf
