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
