// One bit per huge page: has it been handed out since the kernel last had it?
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/base/align.h"

namespace zinf {

// A half-open range of byte offsets.
struct Extent {
  std::size_t begin = 0;
  std::size_t end = 0;

  std::size_t bytes() const { return end - begin; }
  bool empty() const { return begin >= end; }

  // The huge pages that it touches, and those that it covers wholly; as
  // offsets, possibly empty.
  Extent outer_pages() const {
    return {align_down(begin, kHugePage), align_up(end, kHugePage)};
  }
  Extent inner_pages() const {
    return {align_up(begin, kHugePage), align_down(end, kHugePage)};
  }
};

// One at a time. Extents are of whole huge pages.
class PageMap {
 public:
  explicit PageMap(std::size_t bytes)
      : words_((bytes / kHugePage + 63) / 64 + 1) {}

  std::size_t set_bytes() const { return num_set_ * kHugePage; }

  // Bytes of pages in the extent that are not set.
  std::size_t clear_bytes_in(Extent pages) const {
    std::size_t set = 0;
    for_each_word(pages, [&](std::size_t i, std::uint64_t mask) {
      set += static_cast<std::size_t>(std::popcount(words_[i] & mask));
    });
    return pages.bytes() - set * kHugePage;
  }

  void set(Extent pages) {
    num_set_ += clear_bytes_in(pages) / kHugePage;
    for_each_word(
        pages, [&](std::size_t i, std::uint64_t mask) { words_[i] |= mask; });
  }

  void clear(Extent pages) {
    num_set_ -= (pages.bytes() - clear_bytes_in(pages)) / kHugePage;
    for_each_word(
        pages, [&](std::size_t i, std::uint64_t mask) { words_[i] &= ~mask; });
  }

  // The last run of set pages inside the extent; empty when there is none.
  Extent last_set_run(Extent pages) const {
    std::size_t end = pages.end;
    while (end > pages.begin && !is_set(end - kHugePage)) end -= kHugePage;
    std::size_t begin = end;
    while (begin > pages.begin && is_set(begin - kHugePage)) begin -= kHugePage;
    return {begin, end};
  }

 private:
  bool is_set(std::size_t offset) const {
    std::size_t page = offset / kHugePage;
    return (words_[page / 64] >> (page % 64) & 1) != 0;
  }

  template <typename Body>
  void for_each_word(Extent pages, const Body& body) const {
    std::size_t page = pages.begin / kHugePage;
    std::size_t end = pages.end / kHugePage;
    while (page < end) {
      std::size_t in_word = page % 64;
      std::size_t count = std::min<std::size_t>(64 - in_word, end - page);
      std::uint64_t ones =
          count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
      body(page / 64, ones << in_word);
      page += count;
    }
  }

  std::vector<std::uint64_t> words_;
  std::size_t num_set_ = 0;
};

}  // namespace zinf
