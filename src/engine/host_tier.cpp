#include "zinf/host_tier.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "src/engine/scratch.h"

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
  for (const std::string& path : nvme) {
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
  std::shared_ptr<void> giver;  // of the residency's memory
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
  tier->parts_.reset(
      new Parts{options, memory, scratch,
                Residency({.allocate = memory->slabs(),
                           .backing = scratch,
                           .leaving = std::move(leaving),
                           .others =
                               [&other = *memory](std::uint64_t bytes) {
                                 return other.make_room(bytes) > 0;
                               },
                           .away_limit_bytes = options.away_bytes}),
                nullptr});
  Residency& residency = tier->parts_->residency;
  tier->parts_->giver = memory->add_giver(
      [&](std::uint64_t bytes) { return residency.make_room(bytes); });
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
  return stats;
}

}  // namespace zinf
