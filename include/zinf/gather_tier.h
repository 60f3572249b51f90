// Whole units in the host's memory, above the slices that the ranks keep.
//
// A unit that is split over ranks has its whole content here while it is used.
// Below it is this rank's slice, a state of the host's tier like any other, and
// the other ranks' slices, which the Exchange brings. To read a unit is to
// gather it; to write it is to keep this rank's slice, as every rank makes the
// same changes (Note [Changes] in zinf/exchange.h). So a whole that is not
// needed costs nothing but its memory, and leaves it first.
//
// Uses are announced: what is expected next is gathered ahead of its use, as
// far as memory allows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "zinf/exchange.h"
#include "zinf/host_tier.h"
#include "zinf/residency.h"
#include "zinf/status.h"
#include "zinf/trace.h"

namespace zinf {

struct GatherTierOptions {
  // As in ResidencyOptions.
  AskLeave leaving = {};
  // Of wholes: kAway lets them leave after each use, up to away_bytes.
  Home home = Home::kBelow;
  std::uint64_t away_bytes = 0;
  // Wholes of so many bytes are gathered ahead; 0: none.
  std::uint64_t ahead_bytes = 0;
  // Called before a slice is read, here or for another rank, by who wants what
  // so many passes have made of it: whatever was put off for that is to be
  // done. It may wait for this rank's other threads.
  std::function<Status(std::uint32_t unit, std::uint64_t passes)> settle = {};
  // Keeps this rank's slice of a whole that was changed. None: in its state.
  std::function<Status(std::uint32_t unit, std::span<const std::byte>)> keep =
      {};
  // Every rank has dropped the unit: its slice may go.
  std::function<void(std::uint32_t unit)> dropped = {};
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

  // A unit, in the same order on all ranks, with this rank's slice of it, which
  // nobody removes before `dropped`; none where it is empty, or set later: then
  // no rank may ask for it before.
  std::uint32_t add(const UnitSpec& spec, std::optional<StateRef> slice = {});
  void set_slice(std::uint32_t unit, StateRef slice);
  // Nobody on this rank opens it again.
  void drop(std::uint32_t unit);

  struct Split {
    std::uint32_t unit = 0;  // of the exchange
    StateRef whole;          // of residency()
  };
  enum class Content : std::uint8_t { kNone, kInSlices };
  // The whole of a unit: one at a time.
  Result<Split> open(std::uint32_t unit, Content content, void* owner);
  void close(const Split& split);

  // What so many passes have made is what is read from now on. What was
  // gathered before stays until outdate().
  void set_passes(std::uint64_t passes);
  std::uint64_t passes() const;

  // The slices are new: the whole is gathered again when it is used. Where
  // somebody has its address, it is gathered at once, to the same place.
  Status outdate(const Split& split);

  // Wholes that are used at once, before they are pinned.
  void announce(std::span<const StateUse> at_once);
  // What is announced next is the first of a step.
  void end_step();

  Residency& residency();
  Exchange& exchange();

 private:
  class Impl;
  explicit GatherTier(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zinf
