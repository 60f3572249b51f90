// How many bytes are in memory at each position of a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zinf::sched {

// Many arcs at once (see Load): O(1) for each, O(positions) for the sums.
class ArcSums {
 public:
  explicit ArcSums(std::size_t num_positions) : steps_(num_positions + 1) {}

  void add(std::size_t first, std::size_t length, std::int64_t bytes);
  std::vector<std::int64_t> sums() &&;  // by position

 private:
  std::vector<std::int64_t> steps_;  // to the position before
};

// Positions on a circle; an arc [first, first + length) may lead over its end
// and is at most one round. Everything is O(log positions). One thread.
class Load {
 public:
  explicit Load(const std::vector<std::int64_t>& bytes);  // by position

  void add(std::size_t first, std::size_t length, std::int64_t bytes);

  // How many positions at and after, or directly before, this one have at most
  // `bytes`: without an exception, and no more than `length`.
  std::size_t room_from(std::size_t position, std::size_t length,
                        std::int64_t bytes) const;
  std::size_t room_before(std::size_t position, std::size_t length,
                          std::int64_t bytes) const;

 private:
  // Note [Load]: a segment tree. Node i has the children 2i and 2i + 1; its max
  // includes what was added to itself and below, not to the nodes above it.
  struct Node {
    std::int64_t max = 0;
    std::int64_t added = 0;
  };
  void pull(std::size_t node);
  std::int64_t added_above(std::size_t node) const;
  void add_line(std::size_t first, std::size_t last, std::int64_t bytes);
  // The first position in [first, last) with more than `bytes`, else `last`.
  std::size_t first_above(std::size_t first, std::size_t last,
                          std::int64_t bytes) const;
  // Behind the last such position, else `first`.
  std::size_t behind_above(std::size_t first, std::size_t last,
                           std::int64_t bytes) const;

  std::size_t size_;
  std::size_t leaves_ = 1;
  std::vector<Node> nodes_;
};

}  // namespace zinf::sched
