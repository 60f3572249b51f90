#include "zinf/host_tier.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <utility>

#include "src/base/mutex.h"
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
  for (const auto& [path, limit] : nvme) {
    std::error_code error;
    if (!std::filesystem::is_directory(path, error)) {
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
  std::shared_ptr<Scratch> scratch;  // null without NVMe
  Residency residency;
  std::shared_ptr<void> giver = nullptr;  // of the residency's memory
  std::atomic<std::uint64_t> others_high_bytes = 0;
  std::uint64_t others_before_bytes = 0;  // while measuring
  Mutex mutex = {};
  Wear wear ZINF_GUARDED_BY(mutex);
};

Result<std::shared_ptr<HostTier>> HostTier::create(
    std::shared_ptr<HostMemory> memory, const HostTierOptions& options,
    std::function<Leave(StateRef, void* owner)> leaving) {
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
  tier->parts_->giver = memory->add_giver(
      [&, self = tier.get()](std::uint64_t bytes) {
        self->note_others(bytes);
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
  parts_->memory->start_measuring(most_bytes);
}

std::uint64_t HostTier::stop_measuring() {
  std::uint64_t least = parts_->memory->stop_measuring();
  if (least != 0) parts_->others_high_bytes = parts_->others_before_bytes;
  return least;
}

void HostTier::note_others(std::uint64_t more_bytes) {
  std::uint64_t units = parts_->residency.stats().memory_bytes;
  std::uint64_t kept = parts_->memory->idle_bytes();
  std::uint64_t used = parts_->memory->budget().usage().total.used_bytes;
  std::uint64_t now = used - std::min(used, units + kept) + more_bytes;
  std::uint64_t high = parts_->others_high_bytes;
  while (high < now &&
         !parts_->others_high_bytes.compare_exchange_weak(high, now)) {
  }
}

void HostTier::count_step() {
  std::uint64_t bytes = parts_->residency.stats().bytes_written;
  MutexLock lock(parts_->mutex);
  parts_->wear.count_step(bytes, std::chrono::steady_clock::now());
}

void HostTier::unlink_files() {
  if (parts_->scratch != nullptr) parts_->scratch->unlink_files();
}

Residency& HostTier::residency() { return parts_->residency; }
HostMemory& HostTier::memory() { return *parts_->memory; }
const HostTierOptions& HostTier::options() const { return parts_->options; }

HostTierStats HostTier::stats() const {
  HostTierStats stats;
  stats.residency = parts_->residency.stats();
  if (parts_->scratch != nullptr) {
    stats.nvme_bytes = parts_->scratch->capacity_bytes();
  }
  stats.others_high_bytes = parts_->others_high_bytes;
  MutexLock lock(parts_->mutex);
  stats.wear = parts_->wear.stats();
  return stats;
}

}  // namespace zinf
