#include "src/shard/passes.h"

#include <algorithm>
#include <utility>

#include "src/base/strf.h"

namespace zinf::shard {
namespace {

std::size_t number(std::uint64_t value) {
  return static_cast<std::size_t>(value);
}

std::vector<int> listed(const std::vector<bool>& there) {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < there.size(); ++rank) {
    if (there[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace

Passes::Passes(std::vector<int> numbers, int total)
    : numbers_(std::move(numbers)),
      total_(total),
      closed_(numbers_.size()),
      left_(numbers_.size()) {}

Result<std::optional<Passes::Complete>> Passes::add(const PartName& part) {
  const auto rank = static_cast<std::size_t>(part.rank);
  ZINF_TRY(check_left(part.pass));
  if (closed_[rank] > part.pass) {
    return Status::error(Code::kInvalid,
                         strf("rank %d has a gradient for pass %zu, which it "
                              "has closed",
                              numbers_[rank], number(part.pass)));
  }
  Pass& pass = passes_[part.pass];
  Ranks& there = pass.units[part.unit];
  there.resize(closed_.size());
  if (there[rank]) {
    return Status::error(Code::kInvalid,
                         strf("rank %d has two gradients in pass %zu",
                              numbers_[rank], number(part.pass)));
  }
  there[rank] = true;
  if (!is_complete(there, part.pass)) return std::optional<Complete>();
  Complete complete{part.unit, listed(there)};
  pass.units.erase(part.unit);
  ++pass.taking;
  return std::optional(std::move(complete));
}

Result<std::vector<Passes::Complete>> Passes::close(int rank,
                                                    std::uint64_t pass) {
  std::uint64_t& closed = closed_[static_cast<std::size_t>(rank)];
  if (closed != pass) {
    return Status::error(Code::kInvalid,
                         strf("rank %d closes pass %zu after %zu passes",
                              numbers_[static_cast<std::size_t>(rank)],
                              number(pass), number(closed)));
  }
  closed = pass + 1;
  ZINF_TRY(check_left(pass));
  std::vector<Complete> complete;
  Pass& at = passes_[pass];
  std::erase_if(at.units, [&](const auto& each) {
    if (!is_complete(each.second, pass)) return false;
    complete.push_back({each.first, listed(each.second)});
    return true;
  });
  at.taking += static_cast<int>(complete.size());
  return complete;
}

void Passes::taken(std::uint32_t unit, std::uint64_t pass) {
  --passes_.at(pass).taking;
  taken_[unit] = pass + 1;
}

// Passes end in their order: who closes one last has closed those before, and
// what it completed with that was taken before its next word was heard.
bool Passes::end(std::uint64_t pass) {
  const auto found = passes_.find(pass);
  if (found == passes_.end() || found->second.taking > 0 ||
      std::ranges::min(closed_) <= pass) {
    return false;
  }
  passes_.erase(found);
  return true;
}

void Passes::settle(std::uint64_t pass) {
  settled_ = std::max(settled_, pass + 1);
}

Status Passes::leave(int rank) {
  left_[static_cast<std::size_t>(rank)] = true;
  if (passes_.empty()) return {};
  return check_left(passes_.rbegin()->first);
}

std::uint64_t Passes::closed(int rank) const {
  return closed_[static_cast<std::size_t>(rank)];
}

bool Passes::left(int rank) const {
  return left_[static_cast<std::size_t>(rank)];
}

bool Passes::all_left() const { return std::ranges::count(left_, false) == 0; }

std::uint64_t Passes::settled(std::uint32_t unit) const {
  const auto found = taken_.find(unit);
  return std::max(settled_, found == taken_.end() ? 0 : found->second);
}

bool Passes::is_complete(const Ranks& there, std::uint64_t pass) const {
  for (std::size_t rank = 0; rank < closed_.size(); ++rank) {
    if (!there[rank] && closed_[rank] <= pass) return false;
  }
  return true;
}

Status Passes::check_left(std::uint64_t pass) const {
  for (std::size_t rank = 0; rank < closed_.size(); ++rank) {
    if (!left_[rank] || closed_[rank] > pass) continue;
    return rank_is_gone(
        numbers_[rank], total_,
        strf("it has ended after %zu backward passes and steps, others go on",
             number(closed_[rank])));
  }
  return {};
}

}  // namespace zinf::shard
