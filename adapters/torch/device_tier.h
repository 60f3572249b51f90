// A device's memory above the host's: a unit on a device is brought from the
// host, which brings it from NVMe. Device-generic: torch's allocator of the
// device, and torch's copies.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "zinf/budget.h"
#include "zinf/host_tier.h"
#include "zinf/residency.h"

namespace zinf {

struct DeviceTierOptions {
  std::uint64_t bytes = 0;       // for units on the device; 0: no limit
  std::uint64_t away_bytes = 0;  // see HostTierOptions
};

// Thread-safe. The host's tier must outlive it.
class DeviceTier {
 public:
  static Result<std::unique_ptr<DeviceTier>> create(
      HostTier& host, c10::Device device, const DeviceTierOptions& options,
      std::function<Leave(StateRef, void* owner)> leaving);

  Result<StateRef> add(const StateSpec& spec, Role role, void* owner);
  // Where the user wants it on the host, it is on the device while it is used.
  Home home_of(Role role) const;
  Reservation count(Tag tag, std::uint64_t bytes);
  Residency& residency() { return residency_; }

 private:
  DeviceTier(HostTier& host, Budget budget, ResidencyOptions options)
      : host_(host),
        budget_(std::move(budget)),
        residency_(std::move(options)) {}

  HostTier& host_;
  Budget budget_;
  Residency residency_;
};

}  // namespace zinf
