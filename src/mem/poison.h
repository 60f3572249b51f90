// Tells AddressSanitizer which bytes of the arena nobody may touch, so that a
// use after free inside the arena is found as it is in malloc. Nothing in other
// builds.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define ZINF_NO_ASAN [[gnu::no_sanitize_address, gnu::noinline]]
#else
#define ZINF_NO_ASAN
#endif

namespace zinf {

inline void poison([[maybe_unused]] const void* begin,
                   [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(begin, bytes);
#endif
}

inline void unpoison([[maybe_unused]] const void* begin,
                     [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(begin, bytes);
#endif
}

// What a free small block holds: the next one, and a mark by which a second
// free is noticed. Read and written while the block is poisoned.
struct FreeBlock {
  FreeBlock* next;
  const void* mark;

  ZINF_NO_ASAN static FreeBlock* next_of(const FreeBlock* block) {
    return block->next;
  }
  ZINF_NO_ASAN static const void* mark_of(const FreeBlock* block) {
    return block->mark;
  }
  ZINF_NO_ASAN static void clear_mark(FreeBlock* block) {
    block->mark = nullptr;
  }
  ZINF_NO_ASAN static void link(FreeBlock* block, FreeBlock* next,
                                const void* mark) {
    block->next = next;
    block->mark = mark;
  }
};

}  // namespace zinf
