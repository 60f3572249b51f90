#include "adapters/torch/device_tier.h"

#include <algorithm>
#include <utility>

namespace zinf {
namespace {

// As of a PCIe 4 slot. Plans start reads as early as there is room: on a device
// the host does not see how long the computing takes.
constexpr DiskSpeed kLink{20e9, 20e9};

// Counted in the budget.
Allocate device_memory(Budget budget, std::shared_ptr<DeviceLink> link) {
  return [budget, link](std::size_t bytes) -> Result<Block> {
    ZINF_ASSIGN(Reservation reservation, budget.reserve(Tag::kUnit, bytes));
    return link->allocate(bytes, std::move(reservation));
  };
}

Role role_of(const StateSpec& spec) {
  for (Role role : {Role::kWeight, Role::kGrad}) {
    if (spec.state == role_name(role)) return role;
  }
  return Role::kState;  // each has its own name
}

DeviceCopies copies_over(std::shared_ptr<DeviceLink> link) {
  return {.to_device =
              [link](std::span<std::byte> to, std::span<const std::byte> from) {
                return link->to_device(to, from);
              },
          .to_host =
              [link](std::span<std::byte> to, std::span<const std::byte> from) {
                return link->to_host(to, from);
              }};
}

}  // namespace

Result<std::unique_ptr<DeviceTier>> DeviceTier::create(
    HostTier& host, c10::Device device, const DeviceTierOptions& options,
    std::function<Leave(StateRef, void* owner)> leaving) {
  std::uint64_t limit = options.bytes == 0 ? kAddressSpaceBytes : options.bytes;
  ZINF_ASSIGN(Budget budget, Budget::create("device_memory", limit));
  auto staging = [&memory = host.memory()](std::uint64_t bytes) {
    return memory.reserve_or_exceed(Tag::kStaging, bytes);
  };
  ZINF_ASSIGN(auto link, DeviceLink::create(device, staging));
  // The host decides where a state lives by its role.
  auto add = [&host](const StateSpec& spec) {
    return host.add(spec, role_of(spec), nullptr);
  };
  std::unique_ptr<DeviceTier> tier(new DeviceTier(
      host, budget, link,
      {.allocate = device_memory(budget, link),
       .backing = host_backing(host.residency(), copies_over(link), add),
       .leaving = std::move(leaving),
       .away_limit_bytes = options.away_bytes}));
  if (options.prefetch) {
    ZINF_ASSIGN(tier->mover_, Mover::create(tier->residency_,
                                            {.room = tier->room_now(),
                                             .disk = [] { return kLink; }}));
  }
  return tier;
}

std::function<Room()> DeviceTier::room_now() {
  return [this]() -> Room {
    BudgetUsage usage = budget_.usage();
    std::uint64_t used = usage.total.used_bytes;
    std::uint64_t units = residency_.stats().memory_bytes;
    return {usage.limit_bytes, used - std::min(used, units)};
  };
}

void DeviceTier::announce(std::span<const StateUse> at_once) {
  if (mover_ != nullptr) mover_->use(at_once);
}

void DeviceTier::count_step() {
  if (mover_ != nullptr) mover_->end_step();
}

void DeviceTier::rest() {
  if (mover_ != nullptr) mover_->set_active(false);
}

Result<StateRef> DeviceTier::add(const StateSpec& spec, Role role,
                                 void* owner) {
  return residency_.add(spec, home_of(role), owner);
}

Home DeviceTier::home_of(Role role) const {
  bool free = host_.options().where(role) == Where::kAuto;
  return free ? Home::kBelow : Home::kAway;
}

Reservation DeviceTier::count(Tag tag, std::uint64_t bytes) {
  return reserve_or_exceed(budget_, tag, bytes, [&] {
    if (mover_ != nullptr) mover_->hold_back();
    (void)residency_.make_room(bytes);
    // A fetch that had begun may have taken it.
    BudgetUsage usage = budget_.usage();
    if (usage.total.used_bytes + bytes <= usage.limit_bytes) return;
    (void)residency_.make_room(bytes);
  });
}

}  // namespace zinf
