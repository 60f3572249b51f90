// A sum whose order depends on the numbers of its terms alone.
//
// Terms are numbered 0, 1, 2, ... and added as a binary tree over these numbers
// would add them: 0 to 1, 2 to 3, then the two sums, and so on. Terms may be
// missing. So whoever has added up the terms of a whole subtree, the sum of all
// has the same bits.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace zinf::shard {

// As many terms are kept as the tree has levels.
template <typename Term>
class TreeSum {
 public:
  bool empty() const { return kept_.empty(); }

  // REQUIRES a greater number than any before. `add(a, b)` adds b to a.
  template <typename Add>
  void add(std::uint64_t number, Term term, const Add& add) {
    // What has no more terms to come is summed up.
    while (kept_.size() > 1 &&
           level(kept_.end()[-2].number, kept_.back().number) <
               level(kept_.back().number, number)) {
      fold(add);
    }
    kept_.push_back({number, std::move(term)});
  }

  // REQUIRES !empty(), and is empty afterwards.
  template <typename Add>
  Term total(const Add& add) {
    while (kept_.size() > 1) fold(add);
    Term sum = std::move(kept_.back().term);
    kept_.clear();
    return sum;
  }

 private:
  struct Kept {
    std::uint64_t number;  // of any term in it
    Term term;
  };

  // Of the smallest subtree that has both.
  static int level(std::uint64_t a, std::uint64_t b) {
    return std::bit_width(a ^ b);
  }

  template <typename Add>
  void fold(const Add& add) {
    Kept last = std::move(kept_.back());
    kept_.pop_back();
    add(kept_.back().term, last.term);
  }

  std::vector<Kept> kept_;
};

}  // namespace zinf::shard
