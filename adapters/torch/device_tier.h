// A device's memory above the host's: a unit on a device is brought from the
// host, which brings it from NVMe.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "adapters/torch/device_link.h"
#include "src/engine/foresight.h"
#include "zinf/budget.h"
#include "zinf/host_tier.h"
#include "zinf/residency.h"

namespace zinf {

struct DeviceTierOptions {
  std::uint64_t bytes = 0;       // for units on the device; 0: no limit
  std::uint64_t away_bytes = 0;  // see HostTierOptions
  // Of what is split over ranks: the host's wholes, and where they live on the
  // device when nobody uses them.
  Residency* wholes = nullptr;
  Home whole_home = Home::kAway;
};

// Thread-safe. The host's tier must outlive it.
class DeviceTier {
 public:
  static Result<std::unique_ptr<DeviceTier>> create(
      HostTier& host, c10::Device device, const DeviceTierOptions& options,
      AskLeave leaving);

  ~DeviceTier() { link_->drop_staging(); }

  Result<StateRef> add(const StateSpec& spec, Role role, void* owner);
  // Above a whole of the host's.
  Result<StateRef> add_whole(const StateSpec& spec, StateRef whole,
                             void* owner);
  // Where the user wants it on the host, it is on the device while it is used.
  Home home_of(Role role) const;
  bool holds_all() const;  // at once
  Reservation count(Tag tag, std::uint64_t bytes);
  // kAddressSpaceBytes: the device's own memory is the limit.
  void set_limit(std::uint64_t bytes);
  // When the device has no memory left for others: everything leaves that
  // nobody has pinned. Returns what units had, or 0 when nothing could leave.
  std::uint64_t give_way();
  // What had no room has it now: a quarter of what units had is all that they
  // get from here on, for others cannot ask for room.
  void stay_below(std::uint64_t had_bytes);
  // Of the budget; kAddressSpaceBytes: none was given, or needed.
  std::uint64_t limit_bytes() const { return limit_bytes_; }
  // States of so many bytes are used at once: before they are pinned. What is
  // used soonest stays. `evaluates`: see Foresight.
  void announce(std::span<const StateUse> at_once, std::uint64_t bytes,
                bool evaluates);
  void count_step() { foresight_.end_step(); }
  Residency& residency() { return residency_; }
  DeviceLink& link() { return *link_; }

 private:
  DeviceTier(HostTier& host, const DeviceTierOptions& options, Budget budget,
             std::shared_ptr<DeviceLink> link, AskLeave leaving);
  Result<HostState> add_below(const StateSpec& spec);
  // Whether what is in use may stay: else nobody is to expect it.
  bool stays_between_uses() const;

  HostTier& host_;
  const DeviceTierOptions options_;
  Budget budget_;
  std::atomic<std::uint64_t> limit_bytes_;  // the budget's
  const std::shared_ptr<DeviceLink> link_;
  std::mutex adding_;                // for what follows
  std::optional<StateRef> opening_;  // the whole that is added now
  Residency residency_;
  Foresight foresight_;
};

}  // namespace zinf
