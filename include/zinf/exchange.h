// What the ranks of a group give each other: slices of weights, and parts of
// gradients.
//
// Every unit is split over the ranks (zinf/partition.h). Each rank keeps its
// slice and serves it to whoever asks, on threads of its own; gradients go to
// the keepers of their slices. Nothing here is a collective: no rank has to
// make the call that another makes, and a rank waits only for content that it
// asked for.
//
// Note [Passes]: backward passes are counted, by each rank for itself. A pass
// gives at most one part of a gradient per unit and rank. A unit's parts are
// complete when every rank has sent one or closed the pass; then the keeper
// gets them, in the order of ranks, so sums are the same in every run. A reader
// says how many passes the content that it wants has behind it, and the answer
// waits until that many are settled for the unit. The keeper cannot be ahead of
// the reader: the next pass takes a part from every rank, or its word that
// there is none.
//
// Note [Changes]: whatever else changes a unit (its start values, a load, a
// user's edit) is done by every rank, to its whole. Each announces it when it
// needs the old content no more, and keeps its slice of the new when all have:
// so nobody is given content that is newer than what it asked for. Changes of a
// unit are counted, and an answer waits for those that the reader has
// announced. A rank that closes a pass without a change that another has waited
// with since before is an error on all. So are different contents: each rank
// tells a hash of its new whole, and when two ranks have begun the same pass,
// what they have changed before must be the same. Not earlier: what one change
// has made different another may make the same again.
//
// When a rank fails, or finds that another has another model, it tells all
// others: everything under way fails everywhere, with the reason.
#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zinf/block.h"
#include "zinf/comm.h"
#include "zinf/move.h"
#include "zinf/partition.h"
#include "zinf/status.h"

namespace zinf {

struct PartName {
  std::uint32_t unit = 0;
  std::uint64_t pass = 0;
  int rank = 0;  // whose gradient it is
  auto operator<=>(const PartName&) const = default;
};

// The rank that an Exchange serves. Thread-safe; called on the Exchange's
// threads, and inside push() and close_pass(), where it must not wait for
// another rank.
class Keeper {
 public:
  virtual ~Keeper() = default;
  // Its slice of a unit, or more memory that begins with it: what so many
  // passes have made of it.
  virtual Result<Block> slice(std::uint32_t unit, std::uint64_t passes) = 0;
  // Memory for a rank's part of a gradient: this rank's slice of it. When it is
  // filled the block goes; the keeper has the part from there on, in memory or
  // elsewhere.
  virtual Result<Block> room(const PartName& part, std::size_t bytes) = 0;
  // All parts of a unit's gradient in this pass are there: those of these
  // ranks, in their order, and at least one.
  virtual Status take(std::uint32_t unit, std::uint64_t pass,
                      const std::vector<int>& ranks) = 0;
  // Every rank has closed the pass, and all that it brought was taken.
  virtual Status pass_over(std::uint64_t pass) = 0;
};

// The same on all ranks, and so is the order in which units are added.
struct UnitSpec {
  std::string name;
  std::uint64_t elements = 0;
  std::uint32_t element_bytes = 0;
};

// Thread-safe. What it gives to wait for must not outlive it.
class Exchange {
 public:
  // The keeper must outlive it.
  static Result<std::unique_ptr<Exchange>> create(std::shared_ptr<Comm> comm,
                                                  Keeper& keeper);
  ~Exchange();  // others find this rank gone, unless finish() came before
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // The number that the next unit gets, and the next unit.
  std::uint32_t next_unit() const;
  std::uint32_t add(const UnitSpec& unit);
  Partition partition(std::uint32_t unit) const;
  // This rank's, of a whole.
  std::span<std::byte> own_slice(std::uint32_t unit,
                                 std::span<std::byte> whole) const;

  // The other ranks' slices of a unit, after so many passes, into the memory of
  // the whole. Small slices are asked for together: with the next large one,
  // when there are many, or when somebody asks whether one of them is there.
  std::unique_ptr<Move> pull(std::uint32_t unit, std::uint64_t passes,
                             std::span<std::byte> into);
  // Waits until so many passes are settled for this rank's own slice.
  Status settled(std::uint32_t unit, std::uint64_t passes);
  // The whole gradient of a pass: its slices go to their keepers, of which this
  // rank is one. Once per unit and pass, before the pass is closed.
  std::unique_ptr<Move> push(std::uint32_t unit, std::uint64_t pass,
                             std::span<const std::byte> gradient);
  // This rank has no more gradients for it. Passes are closed in their order,
  // from 0 on. `what` is what ranks close, for the error when it differs.
  std::unique_ptr<Move> close_pass(std::uint64_t pass, std::string_view what);
  // Waits until all ranks have closed it. The units of which some rank has
  // pushed a part, in their order. Once per pass.
  Result<std::vector<std::uint32_t>> wait_closed(std::uint64_t pass);
  // Waits for that too, at most so long. The ranks that have not closed it yet,
  // by their numbers in the world.
  Result<std::vector<int>> missing(std::uint64_t pass,
                                   std::chrono::milliseconds patience);

  // This rank needs the content of the unit as it was no more.
  void announce_change(std::uint32_t unit);
  // Calls `make` when all have announced what this rank has last: here, or on a
  // thread of the exchange. It must not wait for another rank.
  std::unique_ptr<Move> change(std::uint32_t unit,
                               std::function<Status()> make);
  // The same for who does not wait for it.
  void change_later(std::uint32_t unit, std::function<Status()> make);
  // What the change that was announced last makes of the whole, as a hash:
  // ranks compare it. Before change().
  void note_content(std::uint32_t unit, std::uint64_t hash);
  // What this rank has noted last of each unit; 0: nothing.
  std::vector<std::uint64_t> contents() const;

  // Serves others until they have called it too.
  Status finish();

  // Everything fails with this, here, and on all other ranks with the number of
  // this rank before it. The first one counts.
  void fail(const Status& why);
  // What it has failed with, or ok.
  Status status() const;

 private:
  class Impl;
  explicit Exchange(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zinf
