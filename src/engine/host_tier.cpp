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

// Members are destroyed from the last: the states before what they use.
struct HostTier::Parts {
  HostTierOptions options;
  Budget budget;
  SlabPool pool;
  std::shared_ptr<Scratch> scratch;  // null without NVMe
  Residency residency;
};

Result<std::shared_ptr<HostTier>> HostTier::create(
    const HostTierOptions& options,
    std::function<Leave(StateRef, void* owner)> leaving) {
  ZINF_TRY(options.validate());
  std::uint64_t limit =
      options.host_bytes == 0 ? kAddressSpaceBytes : options.host_bytes;
  ZINF_ASSIGN(Budget budget, Budget::create("host_memory", limit));
  ZINF_ASSIGN(SlabPool pool,
              SlabPool::create({.budget = &budget, .tag = Tag::kWeight}));
  std::shared_ptr<Scratch> scratch;
  if (!options.nvme.empty()) {
    scratch = std::make_shared<Scratch>(options.nvme);
  }
  std::shared_ptr<HostTier> tier(new HostTier());
  tier->parts_.reset(
      new Parts{options, std::move(budget), pool, scratch,
                Residency({.allocate = slab_memory(pool),
                           .backing = scratch,
                           .leaving = std::move(leaving),
                           .away_limit_bytes = options.away_bytes})});
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
  return parts_->residency.add(spec, home_of(role), owner);
}

Status HostTier::reserve(std::uint64_t bytes, std::size_t num_states) {
  if (parts_->scratch == nullptr) return {};
  return parts_->scratch->reserve(bytes, num_states);
}

void HostTier::unlink_files() {
  if (parts_->scratch != nullptr) parts_->scratch->unlink_files();
}

Reservation reserve_or_exceed(const Budget& budget, Tag tag,
                              std::uint64_t bytes,
                              const std::function<void()>& make_room) {
  auto reservation = budget.reserve(tag, bytes);
  if (!reservation.ok()) {
    make_room();
    reservation = budget.reserve(tag, bytes);
  }
  if (!reservation.ok()) {
    reservation = budget.reserve(tag, 0);
    reservation->grow_beyond_limit(bytes);
  }
  return std::move(reservation).value();
}

Reservation HostTier::count(Tag tag, std::uint64_t bytes) {
  return reserve_or_exceed(parts_->budget, tag, bytes, [&] {
    (void)parts_->residency.make_room(bytes);
    parts_->pool.trim();  // what came back is kept, and counted, until then
  });
}

Residency& HostTier::residency() { return parts_->residency; }
const Budget& HostTier::budget() const { return parts_->budget; }
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
