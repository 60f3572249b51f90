#include "src/engine/mover.h"

#include <algorithm>
#include <utility>

#include "src/base/align.h"
#include "src/base/start_thread.h"
#include "zinf/io.h"

namespace zinf {
namespace {

// Where no step ever ends (inference), what is recorded has an end all the
// same.
constexpr std::size_t kMostPositions = std::size_t{1} << 16;
constexpr std::size_t kMostPlans = 16;
constexpr int kMostAtOnce = 32;  // tasks
// Smaller requests cost more CPU per byte, and the disk is slower with them.
constexpr std::uint64_t kRequestBytes = kMiB;

// For what comes and goes between two uses.
std::uint64_t margin(std::uint64_t limit) {
  return std::max<std::uint64_t>(limit / 64, 4 * kMiB);
}

// The smallest, as far as they take little of the memory together, are not
// worth a request each.
std::vector<PlanState> plan_states(const std::vector<StateSize>& sizes,
                                   std::uint64_t limit) {
  std::vector<PlanState> states;
  std::vector<std::size_t> small;
  for (const StateSize& size : sizes) {
    if (size.bytes < kRequestBytes && size.home == Home::kBelow) {
      small.push_back(states.size());
    }
    states.push_back({.bytes = align_up(size.bytes, std::uint64_t{kPage}),
                      .stays = size.home == Home::kMemory,
                      .leaves = size.home == Home::kAway});
  }
  std::ranges::sort(small, {}, [&](std::size_t i) { return states[i].bytes; });
  std::uint64_t left = limit / 64;
  for (std::size_t i : small) {
    if (states[i].bytes > left) break;
    left -= states[i].bytes;
    states[i].stays = true;
  }
  return states;
}

// Where what is used at once does not fit beside what others take, some moves
// will come without a plan; the other positions are better off with one.
void leave_room(const Trace& trace, const PlanInput& input,
                std::vector<std::uint64_t>& taken) {
  std::uint64_t stays = 0;
  for (const PlanState& state : input.states) {
    if (state.stays) stays += state.bytes;
  }
  for (std::size_t p = 0; p < trace.size(); ++p) {
    std::uint64_t used = stays;
    for (const StateUse& use : trace.at(p)) {
      const PlanState& state = input.states[use.state];
      if (!state.stays) used += state.bytes;
    }
    taken[p] = std::min(
        taken[p], input.budget_bytes - std::min(input.budget_bytes, used));
  }
}

}  // namespace

Result<std::unique_ptr<Mover>> Mover::create(Residency& residency,
                                             Options options) {
  std::unique_ptr<Mover> mover(new Mover(residency, std::move(options)));
  ZINF_TRY(start_thread(mover->thread_, [self = mover.get()] { self->run(); }));
  return mover;
}

Mover::~Mover() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Mover::set_active(bool active) {
  MutexLock lock(mutex_);
  active_ = active;
  tasks_.clear();
  seconds_.clear();
  taken_.clear();
  while (busy_) idle_.wait(mutex_);
}

std::uint64_t& Mover::seen(std::uint32_t state) {
  if (state >= seen_.size()) seen_.resize(state + 1);
  return seen_[state];
}

// What passed since the last position, without waits, was its compute.
void Mover::note_time() {
  Clock::time_point now = Clock::now();
  ResidencyStats stats = residency_.stats();
  std::uint64_t wait_ns = stats.read_wait_ns + stats.write_wait_ns;
  std::chrono::duration<double> passed = now - last_;
  double waited = static_cast<double>(wait_ns - last_wait_ns_) / 1e9;
  if (!seconds_.empty()) {
    seconds_.back() = std::max(0.0, passed.count() - waited);
  }
  last_ = now;
  last_wait_ns_ = wait_ns;
}

void Mover::use(std::span<const StateUse> at_once) {
  Room room = options_.room();
  MutexLock lock(mutex_);
  if (!active_) return;
  note_time();
  note_taken_locked(room.taken_bytes);
  seconds_.push_back(0);
  taken_.push_back(room.taken_bytes);
  limit_ = room.limit_bytes;
  ++now_;
  if (std::exchange(pressed_, false)) wake_.notify_one();
  Follow follow = book_.use(at_once);
  if (follow != Follow::kRecording && follow != Follow::kUnknown) {
    std::size_t length = book_.trace()->size();
    give_tasks((book_.position() + length - 1) % length);
  }
  for (const StateUse& use : at_once) ++seen(use.state);
  if (follow != Follow::kRecording) tell_next_uses(at_once);
  if (seconds_.size() >= kMostPositions) end_step_locked();
}

void Mover::give_tasks(std::size_t position) {
  auto planned = plans_.find(book_.trace_id());
  if (planned == plans_.end() || !planned->second.plan) return;
  std::span<const Action> actions = planned->second.plan->at(position);
  for (const Action& action : actions) {
    tasks_.push_back({action, seen(action.state)});
  }
  if (!actions.empty()) wake_.notify_one();
}

void Mover::tell_next_uses(std::span<const StateUse> at_once) {
  for (const StateUse& use : at_once) {
    if (use.kind == UseKind::kFree) continue;
    std::optional<std::size_t> until = book_.until_use(use.state);
    residency_.expect({use.state}, now_, until ? now_ + 1 + *until : 0);
  }
}

void Mover::note_taken(std::uint64_t bytes) {
  MutexLock lock(mutex_);
  if (active_) note_taken_locked(bytes);
}

void Mover::hold_back() {
  MutexLock lock(mutex_);
  pressed_ = true;
}

void Mover::note_taken_locked(std::uint64_t bytes) {
  if (!taken_.empty()) taken_.back() = std::max(taken_.back(), bytes);
}

void Mover::end_step() {
  MutexLock lock(mutex_);
  if (active_ && !seconds_.empty()) end_step_locked();
}

void Mover::end_step_locked() {
  note_time();
  book_.end_step();
  if (plans_.size() > kMostPlans) plans_.clear();
  Planned& planned = plans_[book_.trace_id()];
  // What was measured in another step than this one's like says nothing.
  if (seconds_.size() == book_.trace()->size()) {
    ++planned.steps;
    if (plan_is_due(planned)) make_plan(planned);
  }
  seconds_.clear();
  taken_.clear();
}

// Times become known step by step; less room than a plan has counted on costs
// moves that nobody has planned.
bool Mover::plan_is_due(const Planned& planned) const {
  bool power_of_two = (planned.steps & (planned.steps - 1)) == 0;
  if (power_of_two) return true;
  for (std::size_t p = 0; p < taken_.size(); ++p) {
    if (taken_[p] > planned.taken_bytes[p] + margin(limit_)) return true;
  }
  return false;
}

void Mover::make_plan(Planned& planned) {
  Clock::time_point begin = Clock::now();
  std::vector<PlanState> states = plan_states(residency_.sizes(), limit_);
  const Trace& trace = *book_.trace();
  planned.taken_bytes = taken_;
  DiskSpeed disk = options_.disk();
  PlanInput input{.states = states,
                  .budget_bytes = limit_ - std::min(limit_, margin(limit_)),
                  .leaving_bytes = residency_.away_limit(),
                  .request_bytes = kRequestBytes,
                  .read_bytes_per_second = disk.read_bytes_per_second,
                  .write_bytes_per_second = disk.write_bytes_per_second,
                  .compute_seconds = {}};
  if (auto least = least_budget(trace, input); least.ok()) {
    input.budget_bytes = std::max(input.budget_bytes, *least);
  }
  leave_room(trace, input, taken_);
  input.compute_seconds = seconds_;
  input.taken_bytes = taken_;
  Result<Plan> plan = fastest_plan(trace, input);
  planned.plan.reset();
  Forecast forecast;
  if (plan.ok()) {
    Result<Forecast> simulated = simulate(trace, *plan, input);
    if (simulated.ok()) forecast = *simulated;
    planned.plan = std::move(plan).value();
  }
  std::chrono::duration<double> took = Clock::now() - begin;
  stats_.plan_seconds += took.count();
  stats_.forecast_seconds = forecast.seconds;
  stats_.forecast_bytes = forecast.bytes_read + forecast.bytes_written;
}

std::optional<Mover::Task> Mover::next_task() {
  MutexLock lock(mutex_);
  while (true) {
    if (std::optional<Task> task = take_task_locked()) return task;
    if (stopping_) return std::nullopt;
    wake_.wait(mutex_);
  }
}

std::optional<Mover::Task> Mover::task_at_hand() {
  MutexLock lock(mutex_);
  return take_task_locked();
}

std::optional<Mover::Task> Mover::take_task_locked() {
  busy_ = false;
  idle_.notify_all();
  while (!tasks_.empty() && !pressed_ && !stopping_) {
    Task task = tasks_.front();
    tasks_.pop_front();
    busy_ = task.seen == seen(task.action.state);
    if (busy_) return task;
  }
  return std::nullopt;
}

void Mover::run() {
  std::optional<Task> task = next_task();
  while (task) {
    {
      io::Plug plug;  // what is due together goes to the disk together
      for (int i = 0; task && i < kMostAtOnce; ++i) {
        carry_out(*task);
        task = task_at_hand();
      }
    }
    if (!task) task = next_task();
  }
}

void Mover::carry_out(const Task& task) {
  StateRef state{task.action.state};
  switch (task.action.kind) {
    case ActionKind::kWrite:
      residency_.write(state);
      break;
    case ActionKind::kDrop:
      residency_.evict(state);
      break;
    case ActionKind::kFetch:
      (void)residency_.fetch(state);  // else whoever pins it does
      break;
  }
}

MoverStats Mover::stats() const {
  MutexLock lock(mutex_);
  MoverStats stats = stats_;
  stats.steps = book_.stats().steps;
  stats.deviations = book_.stats().deviations;
  return stats;
}

}  // namespace zinf
