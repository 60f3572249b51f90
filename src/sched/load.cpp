#include "src/sched/load.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "src/base/check.h"

namespace zinf::sched {

void ArcSums::add(std::size_t first, std::size_t length, std::int64_t bytes) {
  const std::size_t round = steps_.size() - 1;
  const std::size_t last = first + length;
  steps_[first] += bytes;
  steps_[std::min(last, round)] -= bytes;
  if (last <= round) return;
  steps_[0] += bytes;
  steps_[last - round] -= bytes;
}

std::vector<std::int64_t> ArcSums::sums() && {
  std::partial_sum(steps_.begin(), steps_.end(), steps_.begin());
  steps_.pop_back();
  return std::move(steps_);
}

Load::Load(const std::vector<std::int64_t>& bytes) : size_(bytes.size()) {
  while (leaves_ < size_) leaves_ *= 2;
  nodes_.resize(2 * leaves_);
  for (std::size_t i = 0; i < size_; ++i) nodes_[leaves_ + i].max = bytes[i];
  for (std::size_t node = leaves_ - 1; node > 0; --node) pull(node);
}

void Load::pull(std::size_t node) {
  nodes_[node].max = std::max(nodes_[2 * node].max, nodes_[2 * node + 1].max) +
                     nodes_[node].added;
}

void Load::add(std::size_t first, std::size_t length, std::int64_t bytes) {
  ZINF_DCHECK(first < size_ && length <= size_, "an arc of %zu from %zu of %zu",
              length, first, size_);
  if (length == 0) return;
  const std::size_t last = first + length;
  add_line(first, std::min(last, size_), bytes);
  if (last > size_) add_line(0, last - size_, bytes);
}

// Bottom up: the nodes that together are the arc, then those above its ends.
void Load::add_line(std::size_t first, std::size_t last, std::int64_t bytes) {
  const auto add_to = [&](std::size_t node) {
    nodes_[node].max += bytes;
    nodes_[node].added += bytes;
  };
  std::size_t left = first + leaves_;
  std::size_t right = last + leaves_;
  for (; left < right; left /= 2, right /= 2) {
    if (left % 2 == 1) add_to(left++);
    if (right % 2 == 1) add_to(--right);
  }
  left = (first + leaves_) / 2;
  right = (last - 1 + leaves_) / 2;
  for (; left != right; left /= 2, right /= 2) {
    pull(left);
    pull(right);
  }
  for (; left > 0; left /= 2) pull(left);
}

std::size_t Load::room_from(std::size_t position, std::size_t length,
                            std::int64_t bytes) const {
  const std::size_t last = position + length;
  const std::size_t line = std::min(last, size_);
  const std::size_t found = first_above(position, line, bytes);
  if (found < line || last <= size_) return found - position;
  return size_ - position + first_above(0, last - size_, bytes);
}

std::size_t Load::room_before(std::size_t position, std::size_t length,
                              std::int64_t bytes) const {
  const std::size_t line = position - std::min(length, position);
  const std::size_t found = behind_above(line, position, bytes);
  if (found > line || length <= position) return position - found;
  const std::size_t first = size_ - (length - position);
  return position + size_ - behind_above(first, size_, bytes);
}

// Both go from node to node beside it, up where that leads further, until one
// has too much; then down in it. `above` is what was added above the node.
std::size_t Load::first_above(std::size_t first, std::size_t last,
                              std::int64_t bytes) const {
  if (first == last) return last;
  std::size_t node = leaves_ + first;
  std::int64_t above = added_above(node);
  while (nodes_[node].max + above <= bytes) {
    while (node > 1 && node % 2 == 1) above -= nodes_[node /= 2].added;
    if (node == 1) return last;
    ++node;
  }
  while (node < leaves_) {
    above += nodes_[node].added;
    node *= 2;
    if (nodes_[node].max + above <= bytes) ++node;
  }
  return std::min(node - leaves_, last);
}

std::size_t Load::behind_above(std::size_t first, std::size_t last,
                               std::int64_t bytes) const {
  if (first == last) return first;
  std::size_t node = leaves_ + last - 1;
  std::int64_t above = added_above(node);
  while (nodes_[node].max + above <= bytes) {
    while (node % 2 == 0) above -= nodes_[node /= 2].added;
    if (node == 1) return first;
    --node;
  }
  while (node < leaves_) {
    above += nodes_[node].added;
    node = 2 * node + 1;
    if (nodes_[node].max + above <= bytes) --node;
  }
  return std::max(node - leaves_ + 1, first);
}

std::int64_t Load::added_above(std::size_t node) const {
  std::int64_t sum = 0;
  while (node > 1) sum += nodes_[node /= 2].added;
  return sum;
}

}  // namespace zinf::sched
