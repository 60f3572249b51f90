// Which pages have been handed out since the kernel last had them: huge pages,
// and single ones of those that are split.
#pragma once

#include <algorithm>
#include <bit>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
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

// One at a time. Extents are of whole huge pages, or of whole small ones where
// a name says so. A huge page is set, clear, or split: then each of its small
// pages is one or the other. Few pages are split, most of the time none is.
class PageMap {
 public:
  explicit PageMap(std::size_t bytes)
      : words_((bytes / kHugePage + 63) / 64 + 1) {}

  std::size_t set_bytes() const {
    return num_set_ * kHugePage + num_small_ * kPage;
  }

  // Bytes of pages in the extent that are not set.
  std::size_t clear_bytes_in(Extent pages) const {
    std::size_t set = 0;
    for_each_word(pages, [&](std::size_t i, std::uint64_t mask) {
      set += static_cast<std::size_t>(std::popcount(words_[i] & mask));
    });
    std::size_t clear = pages.bytes() - set * kHugePage;
    for_each_split(pages,
                   [&](auto& page) { clear -= page->second.count() * kPage; });
    return clear;
  }

  std::size_t clear_small_bytes_in(Extent extent) const {
    std::size_t clear = 0;
    Extent covered = for_each_end(
        extent, [&](Extent part) { clear += clear_bytes_of_part(part); });
    return covered.empty() ? clear : clear + clear_bytes_in(covered);
  }

  std::size_t num_split() const { return split_.size(); }
  bool has_split_in(Extent pages) const {
    auto first = split_.lower_bound(pages.begin);
    return first != split_.end() && first->first < pages.end;
  }
  // Whether any of the huge page at this offset is set.
  bool is_touched(std::size_t page) const {
    return is_set(page) || split_.contains(page);
  }

  void set(Extent pages) {
    drop_split(pages);
    num_set_ += clear_bytes_in(pages) / kHugePage;
    for_each_word(
        pages, [&](std::size_t i, std::uint64_t mask) { words_[i] |= mask; });
  }

  void set_small(Extent extent) {
    Extent covered = for_each_end(extent, [&](Extent part) {
      std::size_t page = align_down(part.begin, kHugePage);
      if (!is_set(page)) change_split(page, part, true);
    });
    if (!covered.empty()) set(covered);
  }

  void clear(Extent pages) {
    drop_split(pages);
    num_set_ -= (pages.bytes() - clear_bytes_in(pages)) / kHugePage;
    for_each_word(
        pages, [&](std::size_t i, std::uint64_t mask) { words_[i] &= ~mask; });
  }

  // Inside one huge page; returns the bytes that were set.
  std::size_t clear_small(Extent extent) {
    std::size_t page = align_down(extent.begin, kHugePage);
    std::size_t before = set_bytes();
    if (is_set(page)) {
      clear({page, page + kHugePage});
      split_[page].set();
      num_small_ += SmallPages{}.size();
    }
    if (split_.contains(page)) change_split(page, extent, false);
    return before - set_bytes();
  }

  // The last run of pages inside the extent that are set or split; empty when
  // there is none.
  Extent last_set_run(Extent pages) const {
    std::size_t end = pages.end;
    while (end > pages.begin && !is_touched(end - kHugePage)) end -= kHugePage;
    std::size_t begin = end;
    while (begin > pages.begin && is_touched(begin - kHugePage)) {
      begin -= kHugePage;
    }
    return {begin, end};
  }

 private:
  using SmallPages = std::bitset<kHugePage / kPage>;

  bool is_set(std::size_t offset) const {
    std::size_t page = offset / kHugePage;
    return (words_[page / 64] >> (page % 64) & 1) != 0;
  }

  // Gives the parts that cover no whole huge page, and returns those that are
  // covered.
  template <typename Body>
  static Extent for_each_end(Extent extent, const Body& body) {
    Extent covered = extent.inner_pages();
    if (covered.empty()) {
      // Within one huge page, or on both sides of where two meet.
      std::size_t middle = std::clamp(covered.begin, extent.begin, extent.end);
      if (extent.begin < middle) body(Extent{extent.begin, middle});
      if (middle < extent.end) body(Extent{middle, extent.end});
      return {};
    }
    if (extent.begin < covered.begin) body(Extent{extent.begin, covered.begin});
    if (covered.end < extent.end) body(Extent{covered.end, extent.end});
    return covered;
  }

  std::size_t clear_bytes_of_part(Extent part) const {
    std::size_t page = align_down(part.begin, kHugePage);
    if (is_set(page)) return 0;
    auto split = split_.find(page);
    if (split == split_.end()) return part.bytes();
    std::size_t clear = 0;
    for (std::size_t at = part.begin; at < part.end; at += kPage) {
      clear += split->second[(at - page) / kPage] ? 0 : kPage;
    }
    return clear;
  }

  void change_split(std::size_t page, Extent part, bool to) {
    SmallPages& pages = split_[page];
    num_small_ -= pages.count();
    for (std::size_t at = part.begin; at < part.end; at += kPage) {
      pages[(at - page) / kPage] = to;
    }
    std::size_t count = pages.count();
    num_small_ += count;
    if (count == 0) split_.erase(page);
  }

  void drop_split(Extent pages) {
    for_each_split(pages,
                   [&](auto& page) { num_small_ -= page->second.count(); });
    split_.erase(split_.lower_bound(pages.begin),
                 split_.lower_bound(pages.end));
  }

  template <typename Body>
  void for_each_split(Extent pages, const Body& body) const {
    if (split_.empty()) return;
    for (auto it = split_.lower_bound(pages.begin);
         it != split_.end() && it->first < pages.end; ++it) {
      body(it);
    }
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
  std::map<std::size_t, SmallPages> split_;  // by the offset of the huge page
  std::size_t num_small_ = 0;                // set, of these
};

}  // namespace zinf
