#include "adapters/torch/device_tier.h"

#include <algorithm>
#include <utility>

#include "zinf/bytes.h"
#include "zinf/log.h"

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
    AskLeave leaving) {
  std::uint64_t limit = options.bytes == 0 ? kAddressSpaceBytes : options.bytes;
  ZINF_ASSIGN(Budget budget, Budget::create("device_memory", limit));
  auto staging = [&memory = host.memory()](std::uint64_t bytes) {
    return memory.reserve_or_exceed(Tag::kStaging, bytes);
  };
  ZINF_ASSIGN(auto link, DeviceLink::create(device, staging));
  return std::unique_ptr<DeviceTier>(
      new DeviceTier(host, options, budget, link, std::move(leaving)));
}

DeviceTier::DeviceTier(HostTier& host, const DeviceTierOptions& options,
                       Budget budget, std::shared_ptr<DeviceLink> link,
                       AskLeave leaving)
    : host_(host),
      options_(options),
      budget_(std::move(budget)),
      limit_bytes_(budget_.usage().limit_bytes),
      link_(std::move(link)),
      residency_({.allocate = device_memory(budget_, link_),
                  .backing = host_backing(
                      host.residency(), copies_over(link_),
                      [this](const StateSpec& spec) { return add_below(spec); },
                      options.wholes),
                  .leaving = std::move(leaving),
                  .away_limit_bytes = options.away_bytes}),
      foresight_(residency_, options.bytes / 4) {}

// The host decides where a state lives by its role. A gradient comes there for
// an update: it goes to a disk only where memory is short.
Result<HostState> DeviceTier::add_below(const StateSpec& spec) {
  if (opening_) return HostState{.state = *opening_, .whole = true};
  Role role = role_of(spec);
  Residency& host = host_.residency();
  bool away = host_.home_of(role) == Home::kAway;
  ZINF_ASSIGN(StateRef state,
              role == Role::kGrad && away
                  ? host.add(spec, Home::kBelow, nullptr, Worth::kHigh)
                  : host_.add(spec, role, nullptr));
  return HostState{state};
}

Result<StateRef> DeviceTier::add(const StateSpec& spec, Role role,
                                 void* owner) {
  std::lock_guard lock(adding_);
  return residency_.add(spec, home_of(role), owner);
}

Result<StateRef> DeviceTier::add_whole(const StateSpec& spec, StateRef whole,
                                       void* owner) {
  std::lock_guard lock(adding_);
  opening_ = whole;
  auto added = residency_.add(spec, options_.whole_home, owner);
  opening_.reset();
  return added;
}

Home DeviceTier::home_of(Role role) const {
  bool free = host_.options().where(role) == Where::kAuto;
  return free ? Home::kBelow : Home::kAway;
}

bool DeviceTier::stays_between_uses() const {
  Home whole = options_.wholes == nullptr ? Home::kBelow : options_.whole_home;
  return home_of(Role::kWeight) == Home::kBelow && whole == Home::kBelow;
}

bool DeviceTier::holds_all() const {
  std::uint64_t bytes = 0;
  for (const StateSize& size : residency_.sizes()) {
    if (size.home == Home::kAway) return false;
    bytes += size.bytes;
  }
  return bytes <= limit_bytes_;
}

void DeviceTier::announce(std::span<const StateUse> at_once,
                          std::uint64_t bytes, bool evaluates) {
  if (limit_bytes_ == kAddressSpaceBytes || !stays_between_uses()) return;
  foresight_.use(at_once, bytes, evaluates);
}

Reservation DeviceTier::count(Tag tag, std::uint64_t bytes) {
  return reserve_or_exceed(budget_, tag, bytes,
                           [&] { (void)residency_.make_room(bytes); });
}

std::uint64_t DeviceTier::give_way() {
  const std::uint64_t had = residency_.stats().memory_bytes;
  return residency_.make_room(had) > 0 ? had : 0;
}

void DeviceTier::stay_below(std::uint64_t had_bytes) {
  constexpr std::uint64_t kPart = 4;
  // A weight and its gradient; its states too, where a budget may have put them
  // there.
  const std::uint64_t at_once = options_.bytes == 0 ? 2 : 5;
  std::uint64_t largest = 0;
  for (const StateSize& size : residency_.sizes()) {
    largest = std::max(largest, size.bytes);
  }
  const std::uint64_t limit = std::max(had_bytes / kPart, at_once * largest);
  if (limit >= limit_bytes_) return;
  set_limit(limit);
  log(LogLevel::kWarning,
      "the device has no memory for what an operator makes: weights, "
      "gradients and states take at most %s of it from here on; "
      "device_memory= says so from the start",
      format_bytes(limit).c_str());
}

void DeviceTier::set_limit(std::uint64_t bytes) {
  budget_.set_limit(bytes);
  limit_bytes_ = bytes;
}

}  // namespace zinf
