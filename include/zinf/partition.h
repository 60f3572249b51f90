// How the elements of a unit are split over ranks: contiguous slices of equal
// size, the last ones shorter or empty where there are not enough elements.
#pragma once

#include <cstdint>

namespace zinf {

// Of a unit's elements, in their order in memory.
struct Slice {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t size() const { return end - begin; }
  bool operator==(const Slice&) const = default;
};

class Partition {
 public:
  // Slices begin at multiples of this: of cache lines, and of the vectors that
  // updates are made of, so that a split changes no bit of an update.
  static constexpr std::uint64_t kMultiple = 64;

  // REQUIRES ranks > 0.
  Partition(std::uint64_t elements, int ranks);

  int ranks() const { return ranks_; }
  std::uint64_t elements() const { return elements_; }
  // Of every slice with its padding: so much room each rank needs.
  std::uint64_t slice_elements() const { return slice_elements_; }
  // REQUIRES 0 <= rank < ranks.
  Slice slice(int rank) const;
  // REQUIRES element < elements.
  int rank_of(std::uint64_t element) const;

 private:
  std::uint64_t elements_;
  int ranks_;
  std::uint64_t slice_elements_;
};

}  // namespace zinf
