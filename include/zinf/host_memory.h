// Host memory under one budget: torch's tensors, in the arena, and the engines'
// states, in slabs. What one of them needs, the others give back if they can.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "zinf/arena.h"
#include "zinf/budget.h"
#include "zinf/residency.h"
#include "zinf/slab.h"
#include "zinf/status.h"

namespace zinf {

// Thread-safe. A child of fork() may allocate from the arena, nothing else.
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  // 0: no limit, everything is only counted.
  static Result<std::shared_ptr<HostMemory>> create(std::uint64_t limit_bytes);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // What is held beyond a smaller limit stays; nothing more is given until it
  // is below. While measuring, it holds from the end of that on.
  void set_limit(std::uint64_t limit_bytes);

  // From now on everything that can leave memory does, and a limit that is too
  // small grows, up to `most_bytes`, instead of refusing: in the end it is the
  // least with which the same work can be done.
  void start_measuring(std::uint64_t most_bytes);
  // That limit, or 0 when nothing was measured; the one from before is in force
  // again.
  std::uint64_t stop_measuring();

  const Budget& budget() const;
  Arena& arena();
  // Blocks for states. They take what the arena and the pool hold unused, and
  // never ask for more: kOverBudget tells a Residency to drop states.
  Allocate slabs() const;

  // Somebody who can give memory back when it is short: it returns how many
  // bytes it gave, and must not allocate. It is asked until the handle goes.
  // `hindrance`: why it could not give more, or ok.
  using Giver = std::function<std::uint64_t(std::uint64_t bytes)>;
  [[nodiscard]] std::shared_ptr<void> add_giver(
      Giver giver, std::function<Status()> hindrance = {});
  // The first that a giver tells.
  Status hindrance() const;

  // Asks the givers, the last first, until so many bytes were given back or
  // nothing is left; then compacts the arena. Returns how many.
  std::uint64_t make_room(std::uint64_t bytes);

  // Gives what nobody uses back to the system.
  void trim();
  std::uint64_t idle_bytes() const;  // of states' memory that nobody uses

  // Bytes for what comes later; room is made for them.
  Result<Reservation> reserve(Tag tag, std::uint64_t bytes);

  // Bytes for what cannot be refused: if making room is not enough, the limit
  // is exceeded.
  Reservation reserve_or_exceed(Tag tag, std::uint64_t bytes);

 private:
  HostMemory() = default;
  std::uint64_t ask_givers(std::uint64_t bytes);

  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace zinf
