#include "src/shard/changes.h"

#include <utility>

namespace zinf::shard {

Changes::Changes(int ranks, int own)
    : ranks_(ranks), own_(own), left_(static_cast<std::size_t>(ranks)) {}

std::uint64_t Changes::announce(std::uint32_t unit) {
  const std::uint64_t number = announced(unit) + 1;
  heard(own_, unit, number);
  return number;
}

std::uint64_t Changes::announced(std::uint32_t unit) const {
  return count(own_, unit);
}

void Changes::heard(int rank, std::uint32_t unit, std::uint64_t number) {
  auto& counts = counts_[unit];
  counts.resize(static_cast<std::size_t>(ranks_));
  counts[static_cast<std::size_t>(rank)] = number;
}

std::uint64_t Changes::count(int rank, std::uint32_t unit) const {
  const auto found = counts_.find(unit);
  return found == counts_.end() ? 0
                                : found->second[static_cast<std::size_t>(rank)];
}

void Changes::made(int rank, std::uint32_t unit, std::uint64_t hash) {
  auto& contents = contents_[unit];
  contents.resize(static_cast<std::size_t>(ranks_));
  contents[static_cast<std::size_t>(rank)] = {count(rank, unit), hash};
  for (int other = 0; other < ranks_; ++other) {
    if (other != own_ && (rank == own_ || rank == other)) compare(other, unit);
  }
}

void Changes::compare(int rank, std::uint32_t unit) {
  const auto& contents = contents_.at(unit);
  const Content& theirs = contents[static_cast<std::size_t>(rank)];
  const Content& ours = contents[static_cast<std::size_t>(own_)];
  if (theirs.number != ours.number) return;
  if (theirs.hash == ours.hash) {
    different_.erase({rank, unit});
  } else {
    different_.insert({rank, unit});
  }
}

std::vector<std::uint64_t> Changes::contents() const {
  std::vector<std::uint64_t> all;
  for (const auto& [unit, contents] : contents_) {
    all.resize(unit + 1);
    all[unit] = contents[static_cast<std::size_t>(own_)].hash;
  }
  return all;
}

std::optional<std::uint32_t> Changes::different(int rank) const {
  for (auto at = different_.lower_bound({rank, 0});
       at != different_.end() && at->first == rank; ++at) {
    const std::uint32_t unit = at->second;
    const std::uint64_t number =
        contents_.at(unit)[static_cast<std::size_t>(own_)].number;
    if (count(own_, unit) == number && count(rank, unit) == number) return unit;
  }
  return std::nullopt;
}

bool Changes::is_ready(const Waiting& waiting) const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (left_[static_cast<std::size_t>(rank)]) continue;
    if (count(rank, waiting.unit) < waiting.number) return false;
  }
  return true;
}

std::vector<Changes::Waiting> Changes::take_ready() {
  std::vector<Waiting> ready;
  std::erase_if(waiting_, [&](Waiting& waiting) {
    if (!is_ready(waiting)) return false;
    ready.push_back(std::move(waiting));
    return true;
  });
  return ready;
}

std::vector<Changes::Waiting> Changes::take_all() {
  return std::exchange(waiting_, {});
}

const Changes::Waiting* Changes::missed_by(int rank,
                                           std::uint64_t closed) const {
  for (const Waiting& waiting : waiting_) {
    if (closed > waiting.passes && count(rank, waiting.unit) < waiting.number) {
      return &waiting;
    }
  }
  return nullptr;
}

}  // namespace zinf::shard
