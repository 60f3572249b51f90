// Which rank has brought what in which backward pass: see Note [Passes] in
// zinf/exchange.h. No messages, no threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "zinf/exchange.h"
#include "zinf/status.h"

namespace zinf::shard {

class Passes {
 public:
  // `numbers`: how messages call the ranks, of so many in `total`.
  Passes(std::vector<int> numbers, int total);

  // Parts of a unit that are complete: whose they are, in order. taken() is to
  // follow.
  struct Complete {
    std::uint32_t unit = 0;
    std::vector<int> ranks;
  };
  // A part is there. kInvalid when it cannot be; kGone when it waits for a rank
  // that has ended.
  Result<std::optional<Complete>> add(const PartName& part);
  // A rank has no more parts for a pass. Every rank closes its passes in order.
  Result<std::vector<Complete>> close(int rank, std::uint64_t pass);
  void taken(std::uint32_t unit, std::uint64_t pass);
  // Once per pass, when every rank has closed it and all was taken: true. Then
  // settle() is to follow.
  bool end(std::uint64_t pass);
  void settle(std::uint64_t pass);

  // A rank closes no more passes. kGone when one that is open waits for it.
  Status leave(int rank);

  std::uint64_t closed(int rank) const;  // how many passes
  bool left(int rank) const;
  bool all_left() const;
  // How many passes are behind a unit's content.
  std::uint64_t settled(std::uint32_t unit) const;

 private:
  using Ranks = std::vector<bool>;
  struct Pass {
    std::map<std::uint32_t, Ranks> units;  // whose parts are there, of each
    int taking = 0;                        // units that are complete
  };
  bool is_complete(const Ranks& there, std::uint64_t pass) const;
  Status check_left(std::uint64_t pass) const;

  const std::vector<int> numbers_;
  const int total_;
  std::vector<std::uint64_t> closed_;  // by rank
  std::vector<bool> left_;
  std::map<std::uint64_t, Pass> passes_;  // open
  std::map<std::uint32_t, std::uint64_t> taken_;
  std::uint64_t settled_ = 0;
};

}  // namespace zinf::shard
