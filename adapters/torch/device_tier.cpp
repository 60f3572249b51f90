#include "adapters/torch/device_tier.h"

#include <utility>

namespace zinf {
namespace {

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
  return std::unique_ptr<DeviceTier>(new DeviceTier(
      host, budget, link,
      {.allocate = device_memory(budget, link),
       .backing = host_backing(host.residency(), copies_over(link), add),
       .leaving = std::move(leaving),
       .away_limit_bytes = options.away_bytes}));
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
  return reserve_or_exceed(budget_, tag, bytes,
                           [&] { (void)residency_.make_room(bytes); });
}

}  // namespace zinf
