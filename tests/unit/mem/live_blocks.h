// A model of what an arena has handed out, and what to do with one.
#pragma once

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <tuple>
#include <vector>

#include "src/base/align.h"
#include "src/mem/size_class.h"
#include "tests/unit/mem/mem_test_util.h"
#include "zinf/arena.h"

namespace zinf {

// A model of what is live: no two blocks share a byte, contents stay.
class LiveBlocks {
 public:
  ~LiveBlocks() {
    for (auto [begin, bytes] : blocks_) {
      Arena::free(reinterpret_cast<void*>(begin));
    }
  }

  void add(void* block, std::size_t bytes) {
    auto begin = reinterpret_cast<std::uintptr_t>(block);
    std::size_t held = std::max<std::size_t>(bytes, 1);
    auto after = blocks_.lower_bound(begin);
    RC_ASSERT(after == blocks_.end() || begin + held <= after->first);
    if (after != blocks_.begin()) {
      auto before = std::prev(after);
      RC_ASSERT(before->first + std::max<std::size_t>(before->second, 1) <=
                begin);
    }
    blocks_[begin] = bytes;
    total_ += bytes;
    Pattern::write(block, bytes, begin);
  }

  void free_one(std::size_t pick) {
    if (blocks_.empty()) return;
    auto block = blocks_.begin();
    std::advance(block, pick % blocks_.size());
    auto* pointer = reinterpret_cast<void*>(block->first);
    RC_ASSERT(Pattern::intact(pointer, block->second, block->first));
    Arena::free(pointer);
    total_ -= block->second;
    blocks_.erase(block);
  }

  // Of the pages that live blocks touch, at most: a small one may come from a
  // class of twice its size.
  std::size_t page_bytes() const {
    std::size_t pages = 0;
    std::uintptr_t counted = 0;  // the end of the last page that was
    for (auto [begin, bytes] : blocks_) {
      std::uintptr_t first = std::max(counted, align_down(begin, kPage));
      std::size_t held = bytes;
      if (bytes <= kMaxSmallBytes) {
        held = 2 * kSizeClasses[size_class_of(bytes)].bytes;
      }
      std::uintptr_t end = align_up(begin + held, std::uintptr_t{kPage});
      if (end <= first) continue;
      pages += end - first;
      counted = end;
    }
    return pages;
  }

  bool empty() const { return blocks_.empty(); }
  std::size_t total_bytes() const { return total_; }

 private:
  std::map<std::uintptr_t, std::size_t> blocks_;
  std::size_t total_ = 0;
};

// Kind, size within the kind, which block or alignment.
using Op = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;

inline std::size_t size_of(const Op& op) {
  auto [kind, size, pick] = op;
  switch (kind % 4) {
    case 0:
      return size % 600;
    case 1:
      return size % (40 * kKiB);
    case 2:
      return size % (kMiB);
    default:
      return size % (7 * kMiB);
  }
}

inline rc::Gen<std::vector<Op>> any_ops() {
  auto number = rc::gen::inRange<std::uint32_t>(0, 1u << 30);
  return rc::gen::noShrink(
      rc::gen::resize(100, rc::gen::container<std::vector<Op>>(
                               300, rc::gen::tuple(number, number, number))));
}

}  // namespace zinf
