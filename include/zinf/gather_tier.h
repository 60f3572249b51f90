// Whole units in the host's memory, above the slices that the ranks keep.
//
// A unit that is split over ranks has its whole content here while it is used.
// Below it is this rank's slice, a state of the host's tier like any other, and
// the other ranks' slices, which the Exchange brings. To read a unit is to
// gather it; to write it is to keep this rank's slice, as every rank makes the
// same changes (when no other rank reads it: see Exchange::edited()). So a
// whole that is not needed costs nothing but its memory, and leaves it first.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "zinf/exchange.h"
#include "zinf/host_tier.h"
#include "zinf/residency.h"
#include "zinf/status.h"

namespace zinf {

struct GatherTierOptions {
  // As in ResidencyOptions.
  std::function<Leave(StateRef, void* owner)> leaving = {};
  // Called before a slice is read, here or for another rank: whatever was put
  // off for it is to be done.
  std::function<Status(std::uint32_t unit)> settle = {};
  // A pass's gradient of a unit has this part, of this rank's slice; called for
  // one rank after the other, in their order, when all are there.
  std::function<Status(const PartName& part, std::span<const std::byte>)>
      add_part = {};
  // That was the last one.
  std::function<Status(std::uint32_t unit, std::uint64_t pass)> taken = {};
  // As in Keeper.
  std::function<Status(std::uint64_t pass)> pass_over = {};
};

// Thread-safe.
class GatherTier {
 public:
  // The host's tier must outlive it.
  static Result<std::unique_ptr<GatherTier>> create(HostTier& host,
                                                    std::shared_ptr<Comm> comm,
                                                    GatherTierOptions options);
  // Serves others until they have ended too, unless something has failed.
  Status finish();
  ~GatherTier();

  struct Split {
    std::uint32_t unit = 0;  // of the exchange
    StateRef whole;          // of residency()
  };
  // A unit whose slice of this rank is this state of the host's tier, which
  // must be removed after it. On one thread, in the same order on all ranks.
  Result<Split> add(const UnitSpec& spec, StateRef slice, void* owner);
  void remove(const Split& split);

  // What so many passes have made is what is read from now on. What was
  // gathered before stays until outdate().
  void set_passes(std::uint64_t passes);
  std::uint64_t passes() const;

  // The slices are new: the whole is gathered again when it is used. Where
  // somebody has its address, it is gathered at once, to the same place.
  Status outdate(const Split& split);

  Residency& residency();
  Exchange& exchange();

 private:
  class Impl;
  explicit GatherTier(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zinf
