// Who has announced which changes of units: see Note [Changes] in
// zinf/exchange.h. No messages, no threads.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "src/shard/pending.h"
#include "zinf/status.h"

namespace zinf::shard {

class Changes {
 public:
  Changes(int ranks, int own);

  // One that this rank makes when all have announced theirs.
  struct Waiting {
    std::uint32_t unit = 0;
    std::uint64_t number = 0;  // of the unit's, from 1 on
    std::uint64_t passes = 0;  // that this rank had closed
    std::function<Status()> make;
    std::shared_ptr<Pending> pending;
  };

  // This rank's next change of the unit: its number.
  std::uint64_t announce(std::uint32_t unit);
  // How many this rank has announced.
  std::uint64_t announced(std::uint32_t unit) const;
  void heard(int rank, std::uint32_t unit, std::uint64_t number);
  // A rank reads nothing more: it need not announce any.
  void leave(int rank) { left_[static_cast<std::size_t>(rank)] = true; }

  // What a rank's last change has made of the unit, as a hash.
  void made(int rank, std::uint32_t unit, std::uint64_t hash);
  // Of this rank by unit, as far as there were changes; 0: none.
  std::vector<std::uint64_t> contents() const;
  // The first unit of which that rank and this one have made different contents
  // by the same change, which is the last of both; or none.
  std::optional<std::uint32_t> different(int rank) const;

  void add(Waiting waiting) { waiting_.push_back(std::move(waiting)); }
  // Those that every rank has announced; they wait no more.
  std::vector<Waiting> take_ready();
  std::vector<Waiting> take_all();
  // The first one that a rank has not announced, although it has closed this
  // many passes; or null.
  const Waiting* missed_by(int rank, std::uint64_t closed) const;

 private:
  std::uint64_t count(int rank, std::uint32_t unit) const;
  bool is_ready(const Waiting& waiting) const;
  struct Content {
    std::uint64_t number = 0;  // of the change
    std::uint64_t hash = 0;
  };
  void compare(int rank, std::uint32_t unit);

  const int ranks_;
  const int own_;
  std::map<std::uint32_t, std::vector<std::uint64_t>> counts_;  // by rank
  std::map<std::uint32_t, std::vector<Content>> contents_;      // by rank
  std::set<std::pair<int, std::uint32_t>> different_;  // ranks and units
  std::vector<bool> left_;
  std::vector<Waiting> waiting_;
};

}  // namespace zinf::shard
