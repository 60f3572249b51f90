#include "zinf/host_tier.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <utility>

#include "src/base/mutex.h"
#include "src/base/start_thread.h"
#include "src/engine/mover.h"
#include "src/engine/scratch.h"
#include "src/engine/wear.h"

namespace zinf {

std::string_view role_name(Role role) {
  constexpr std::array<std::string_view, 3> kNames = {"weight", "state",
                                                      "grad"};
  return kNames[static_cast<std::size_t>(role)];
}

Status HostTierOptions::validate() const {
  std::string problems;
  auto complain = [&](const std::string& problem) {
    problems += (problems.empty() ? "" : "; ") + problem;
  };
  if (nvme.empty() && weights == Where::kNvme) {
    complain("weights are to live on NVMe, but no nvme path is given");
  }
  if (nvme.empty() && states == Where::kNvme) {
    complain("states are to live on NVMe, but no nvme path is given");
  }
  for (auto at = nvme.begin(); at != nvme.end(); ++at) {
    const std::string& path = at->path;
    std::error_code error;
    auto is_this = [&](const NvmePath& other) {
      return std::filesystem::equivalent(path, other.path, error);
    };
    if (std::any_of(nvme.begin(), at, is_this)) {
      complain("nvme path \"" + path + "\" is given twice");
    } else if (!std::filesystem::is_directory(path, error)) {
      complain("nvme path \"" + path + "\" is not a directory");
    } else if (access(path.c_str(), W_OK | X_OK) != 0) {
      complain("nvme path \"" + path + "\" may not be written to");
    }
  }
  if (problems.empty()) return {};
  return Status::error(Code::kInvalid, problems);
}

Where HostTierOptions::where(Role role) const {
  return role == Role::kState ? states : weights;
}

// A step uses every state once, and weights and gradients more than once.
static Worth worth_of(Role role) {
  switch (role) {
    case Role::kState:
      return Worth::kLow;
    case Role::kWeight:
      return Worth::kMiddle;
    case Role::kGrad:
      return Worth::kHigh;
  }
  return Worth::kMiddle;
}

// Members are destroyed from the last: the states before what they use.
struct HostTier::Parts {
  HostTierOptions options;
  std::shared_ptr<HostMemory> memory;
  BudgetWatch watch{memory->budget()};
  std::shared_ptr<Scratch> scratch;  // null without NVMe
  Residency residency;
  std::unique_ptr<Mover> mover = nullptr;  // null without NVMe
  std::shared_ptr<void> giver = nullptr;   // of the residency's memory
  std::atomic<std::uint64_t> others_high_bytes = 0;
  std::uint64_t others_before_bytes = 0;  // while measuring
  Mutex mutex = {};
  StepStats step ZINF_GUARDED_BY(mutex) = {};
  ResidencyStats last ZINF_GUARDED_BY(mutex) = {};  // at the last step's end
  std::chrono::steady_clock::time_point last_time ZINF_GUARDED_BY(mutex) = {};
  Wear wear ZINF_GUARDED_BY(mutex);
};

static StepStats difference(const ResidencyStats& last,
                            const ResidencyStats& now) {
  auto seconds = [](std::uint64_t ns) { return static_cast<double>(ns) / 1e9; };
  return {.read_wait_seconds = seconds(now.read_wait_ns - last.read_wait_ns),
          .write_wait_seconds = seconds(now.write_wait_ns - last.write_wait_ns),
          .bytes_read = now.bytes_read - last.bytes_read,
          .bytes_written = now.bytes_written - last.bytes_written,
          .reads = now.reads - last.reads,
          .fetches = now.fetches - last.fetches,
          .late = now.late - last.late,
          .waits = {}};
}

// As it was seen; else as it was measured; else as that of a common drive.
static DiskSpeed speed_of(const Scratch& scratch) {
  StoreStats seen = scratch.stats();
  DiskSpeed tuned = scratch.tuned();
  auto first = [](double a, double b, double c) {
    return a > 0 ? a : b > 0 ? b : c;
  };
  return {
      first(seen.read_bytes_per_second, tuned.read_bytes_per_second, 2e9),
      first(seen.write_bytes_per_second, tuned.write_bytes_per_second, 1e9)};
}

Result<std::shared_ptr<HostTier>> HostTier::create(
    std::shared_ptr<HostMemory> memory, const HostTierOptions& options,
    AskLeave leaving) {
  ZINF_TRY(options.validate());

  std::shared_ptr<Scratch> scratch;
  if (!options.nvme.empty()) {
    scratch = std::make_shared<Scratch>(options.nvme);
  }
  std::shared_ptr<HostTier> tier(new HostTier());
  tier->parts_.reset(new Parts{
      .options = options,
      .memory = memory,
      .scratch = scratch,
      .residency = Residency({.allocate = memory->slabs(),
                              .backing = scratch,
                              .leaving = std::move(leaving),
                              .others =
                                  [&other = *memory](std::uint64_t bytes) {
                                    return other.make_room(bytes) > 0;
                                  },
                              .away_limit_bytes = options.away_bytes}),
      .wear = Wear(options.endurance_bytes != 0
                       ? options.endurance_bytes
                       : default_endurance(options.nvme))});
  Residency& residency = tier->parts_->residency;
  if (scratch != nullptr && options.prefetch) {
    ZINF_ASSIGN(
        tier->parts_->mover,
        Mover::create(
            residency,
            {.room = [self = tier.get()]() -> Room {
               BudgetUsage usage = self->memory().budget().usage();
               return {usage.limit_bytes, self->others_bytes(usage)};
             },
             .disk = [store = scratch.get()] { return speed_of(*store); }}));
  }
  tier->parts_->giver = memory->add_giver(
      [&, self = tier.get()](std::uint64_t bytes) {
        self->note_others(bytes);
        if (self->parts_->mover != nullptr) self->parts_->mover->hold_back();
        return residency.make_room(bytes);
      },
      [&] { return residency.refusal(); });
  return tier;
}

HostTier::~HostTier() = default;

Home HostTier::home_of(Role role) const {
  switch (options().where(role)) {
    case Where::kHost:
      return Home::kMemory;
    case Where::kNvme:
      return Home::kAway;
    case Where::kAuto:
      return parts_->scratch == nullptr ? Home::kMemory : Home::kBelow;
  }
  return Home::kMemory;
}

Result<StateRef> HostTier::add(const StateSpec& spec, Role role, void* owner) {
  return parts_->residency.add(spec, home_of(role), owner, worth_of(role));
}

Status HostTier::reserve(std::uint64_t bytes, std::size_t num_states) {
  if (parts_->scratch == nullptr) return {};
  return parts_->scratch->reserve(bytes, num_states);
}

void HostTier::start_measuring(std::uint64_t most_bytes) {
  parts_->others_before_bytes = parts_->others_high_bytes;
  if (parts_->mover != nullptr) parts_->mover->set_active(false);
  parts_->memory->start_measuring(most_bytes);
}

std::uint64_t HostTier::stop_measuring() {
  std::uint64_t least = parts_->memory->stop_measuring();
  if (least != 0) parts_->others_high_bytes = parts_->others_before_bytes;
  if (parts_->mover != nullptr) parts_->mover->set_active(true);
  return least;
}

void HostTier::announce(std::span<const StateUse> at_once) {
  if (parts_->mover != nullptr) parts_->mover->use(at_once);
}

// What a read takes meanwhile must not count as others'.
std::uint64_t HostTier::others_bytes(const BudgetUsage& usage) const {
  std::uint64_t used = usage.total.used_bytes;
  std::uint64_t kept = parts_->memory->idle_bytes();
  std::uint64_t units = parts_->residency.stats().memory_bytes;
  return used - std::min(used, units + kept);
}

bool HostTier::may_wait(std::uint64_t bytes) const {
  constexpr std::uint64_t kShare = 16;  // of the limit, at most, for one
  if (parts_->mover == nullptr) return false;
  {
    MutexLock lock(parts_->mutex);
    bool moved = parts_->step.bytes_read > 0 || parts_->step.bytes_written > 0;
    if (!moved) return false;
  }
  std::uint64_t limit = parts_->memory->budget().usage().limit_bytes;
  std::uint64_t others = parts_->others_high_bytes;
  return bytes <= limit / kShare && others + bytes + limit / kShare <= limit;
}

bool HostTier::is_short_of(std::uint64_t bytes) const {
  constexpr std::uint64_t kShare = 16;  // for what others take until one looks
  BudgetUsage usage = parts_->memory->budget().usage();
  std::uint64_t limit = usage.limit_bytes;
  return others_bytes(usage) + bytes + limit / kShare > limit;
}

bool HostTier::on_own_thread() { return zinf::on_own_thread; }

void HostTier::rest() {
  if (parts_->mover != nullptr) parts_->mover->set_active(false);
}

void HostTier::note_others(std::uint64_t more_bytes) {
  std::uint64_t now = others_bytes(memory().budget().usage()) + more_bytes;
  if (parts_->mover != nullptr) parts_->mover->note_taken(now);
  std::uint64_t high = parts_->others_high_bytes;
  while (high < now &&
         !parts_->others_high_bytes.compare_exchange_weak(high, now)) {
  }
}

void HostTier::count_step() {
  constexpr std::size_t kMostWaits = 5;
  if (parts_->mover != nullptr) parts_->mover->end_step();
  ResidencyStats now = parts_->residency.stats();
  auto time = std::chrono::steady_clock::now();
  MutexLock lock(parts_->mutex);
  StepStats step = difference(parts_->last, now);
  step.waits = parts_->residency.take_waits(kMostWaits);
  step.seconds =
      std::chrono::duration<double>(time - parts_->last_time).count();
  bool first = parts_->last_time.time_since_epoch().count() == 0;
  if (!first) parts_->step = step;
  parts_->last = now;
  parts_->last_time = time;
  parts_->wear.count_step(now.bytes_written, time);
}

void HostTier::set_verify(Verify verify) {
  if (parts_->scratch != nullptr) parts_->scratch->set_verify(verify);
}

Residency& HostTier::residency() { return parts_->residency; }
HostMemory& HostTier::memory() { return *parts_->memory; }
const HostTierOptions& HostTier::options() const { return parts_->options; }

HostTierStats HostTier::stats() const {
  HostTierStats stats;
  stats.residency = parts_->residency.stats();
  if (parts_->mover != nullptr) stats.mover = parts_->mover->stats();
  if (parts_->scratch != nullptr) {
    StoreStats store = parts_->scratch->stats();
    stats.nvme_bytes = store.capacity_bytes;
    stats.nvme = {store.read_bytes_per_second, store.write_bytes_per_second};
    stats.tuned = parts_->scratch->tuned();
    stats.io_cpu_seconds = store.io_cpu_seconds;
    stats.io_requests = store.io_requests;
    stats.checksum_bytes = store.checksum_bytes;
    stats.checksum_seconds = store.checksum_seconds;
  }
  stats.host = parts_->watch.usage();
  stats.others_high_bytes = parts_->others_high_bytes;
  MutexLock lock(parts_->mutex);
  stats.step = parts_->step;
  stats.wear = parts_->wear.stats();
  return stats;
}

}  // namespace zinf
