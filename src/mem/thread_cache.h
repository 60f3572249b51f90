// The free small blocks that a thread keeps for itself.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "src/mem/poison.h"
#include "src/mem/size_class.h"
#include "src/mem/small_heap.h"

namespace zinf {

// Used by its own thread only, except held_bytes(). Owned by the arena.
//
// Note [Counting live small blocks]. The fast path counts nothing but the
// length of the list that it changes, and stores it last, with release. Live
// bytes are what left the SmallHeap (counted under the arena's lock) minus what
// the caches hold. Whoever reads a length with acquire has everything that came
// before: so a cache may be destroyed as soon as the sum says that no block is
// live, even if its thread was in the middle of a free.
class ThreadCache {
 public:
  // `mark` is what free blocks of this arena carry.
  explicit ThreadCache(const void* mark) : mark_(mark) {
    for (unsigned i = 0; i < kNumClasses; ++i) {
      lists_[i].capacity = kSizeClasses[i].cached;
    }
  }

  // Null when it has none.
  void* pop(unsigned size_class) {
    List& list = lists_[size_class];
    FreeBlock* block = list.head;
    if (block == nullptr) [[unlikely]]
      return nullptr;
    list.head = FreeBlock::next_of(block);
    FreeBlock::clear_mark(block);
    unpoison(block, kSizeClasses[size_class].bytes);
    // A plain add: only this thread writes. Release: see the Note.
    list.count.store(list.count.load(std::memory_order_relaxed) - 1,
                     std::memory_order_release);
    return block;
  }

  // False when the list is full or the block looks as if it were free already;
  // then nothing was done.
  bool push(unsigned size_class, void* pointer) {
    List& list = lists_[size_class];
    auto* block = static_cast<FreeBlock*>(pointer);
    std::uint32_t count = list.count.load(std::memory_order_relaxed);
    if (count == list.capacity || FreeBlock::mark_of(block) == mark_)
        [[unlikely]] {
      return false;
    }
    poison(block, kSizeClasses[size_class].bytes);
    FreeBlock::link(block, list.head, mark_);
    list.head = block;
    list.count.store(count + 1, std::memory_order_release);  // see the Note
    return true;
  }

  // REQUIRES: the list of this class is empty, and the last block links to
  // null.
  void refill(unsigned size_class, BlockList blocks) {
    lists_[size_class].head = blocks.head;
    lists_[size_class].count.store(blocks.count, std::memory_order_release);
  }

  // Takes out at most `wanted` blocks.
  BlockList drain(unsigned size_class, std::uint32_t wanted) {
    List& list = lists_[size_class];
    BlockList drained{list.head, 0};
    while (drained.count < wanted && list.head != nullptr) {
      list.head = FreeBlock::next_of(list.head);
      ++drained.count;
    }
    list.count.store(list.count.load(std::memory_order_relaxed) - drained.count,
                     std::memory_order_release);
    return drained;
  }

  bool contains(unsigned size_class, const void* block) const {
    for (const FreeBlock* free = lists_[size_class].head; free != nullptr;
         free = FreeBlock::next_of(free)) {
      if (free == block) return true;
    }
    return false;
  }

  // Any thread.
  std::size_t held_bytes() const {
    std::size_t held = 0;
    for (unsigned i = 1; i < kNumClasses; ++i) {
      held += lists_[i].count.load(std::memory_order_acquire) *
              std::size_t{kSizeClasses[i].bytes};
    }
    return held;
  }

 private:
  struct List {
    FreeBlock* head = nullptr;
    std::atomic<std::uint32_t> count = 0;
    std::uint32_t capacity = 0;
  };

  const void* const mark_;
  std::array<List, kNumClasses> lists_;
};

}  // namespace zinf
