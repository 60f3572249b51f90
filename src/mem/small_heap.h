// Where small blocks come from and go back to: spans of one size class each.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>

#include "src/mem/page_heap.h"
#include "src/mem/poison.h"
#include "src/mem/size_class.h"
#include "src/mem/virtual_range.h"
#include "zinf/status.h"

namespace zinf {

// Free blocks of one class, linked; what the last one links to does not count.
struct BlockList {
  FreeBlock* head = nullptr;
  std::uint32_t count = 0;
};

// One at a time: the owner's lock protects it, except class_map() (see there).
//
// Spans are cut from chunks of one huge page, so that a few long-lived small
// blocks do not pin huge pages all over the heap. What belongs to a span lies
// outside of it: the fast path never touches it, and spans have no header that
// would cost a 32 KiB class half of its span.
//
// Note [Lean spans]. While memory is short the 4 KiB pages of spans on which no
// block is live go back to the system. Free blocks lie on them, and with them
// the links of the free list: instead of it the heap keeps which blocks of such
// a lean span are live, and takes none from it before the span has its pages
// again.
class SmallHeap {
 public:
  // The memory for its tables, touched only where spans are.
  static Result<VirtualRange> allocate_tables(std::size_t heap_bytes);

  // Cuts its chunks from `pages`, which must outlive it.
  SmallHeap(PageHeap& pages, VirtualRange tables);

  // The class of every granule, 0 where no span is. An entry changes only while
  // no block of its granule is live: whoever holds a live block may read its
  // entry without the lock.
  const std::uint8_t* class_map() const { return class_map_; }

  std::size_t num_spans() const { return num_spans_; }
  // Bytes of blocks that are not here: live, or in a thread's cache.
  std::size_t out_bytes() const { return out_bytes_; }

  // At least one block and at most `wanted`; the last one links to null.
  Result<BlockList> take(unsigned size_class, std::uint32_t wanted,
                         OnRefusal on_refusal);
  // One block, when take() is refused: of this class or of one up to twice as
  // large whose blocks are so aligned, or of a span that takes the 4 KiB pages
  // of others.
  Result<FreeBlock*> take_compact(unsigned size_class, std::size_t alignment);
  // Gives pages without a live block back to the system until `bytes` of them
  // are; returns how many were.
  std::size_t discard_free_pages(std::size_t bytes);
  void give(BlockList blocks);

  // Whether the block is on its span's free list: slow, for error texts.
  bool is_free(const FreeBlock* block) const;

  // Gives back the chunk that is kept for the next span.
  void release_empty_chunks();

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;
  using Blocks = std::bitset<kGranule / kMinAlignment>;  // of a span

  struct Span {
    FreeBlock* free = nullptr;  // blocks that came back
    std::uint32_t num_free = 0;
    std::uint32_t num_carved = 0;  // blocks from its beginning ever handed out
    std::uint32_t previous = kNone;  // in the list of spans with room
    std::uint32_t next = kNone;
    std::uint8_t size_class = 0;
    std::uint8_t granules_back = 0;  // to the span's first granule
    bool listed = false;
    bool lean = false;  // see the Note; never listed
  };

  Result<std::uint32_t> find_room(unsigned size_class, OnRefusal on_refusal);
  Status restore(std::uint32_t index, OnRefusal on_refusal);
  std::size_t discard_granules(std::size_t chunk, std::uint32_t used);
  std::size_t discard_pages_of(std::uint32_t index);
  Blocks live_blocks(std::uint32_t index) const;
  std::uint32_t number_in_span(const FreeBlock* block) const;
  FreeBlock* block_of(std::uint32_t index, std::uint32_t number) const;
  Result<std::uint32_t> add_span(unsigned size_class, OnRefusal on_refusal);
  Result<std::size_t> take_granules(std::uint32_t count, OnRefusal on_refusal);
  void remove_span(std::uint32_t index);
  void give_one(FreeBlock* block);
  FreeBlock* take_one(std::uint32_t index);
  FreeBlock* take_from_class(unsigned first, unsigned last,
                             std::size_t alignment);
  bool has_room(std::uint32_t index) const;
  void list(std::uint32_t index);
  void unlist(std::uint32_t index);
  std::uint32_t span_of(const void* block) const;

  PageHeap& pages_;
  VirtualRange tables_;  // holds the class map and the spans, by granule
  std::uint8_t* class_map_;
  Span* spans_;
  std::array<std::uint32_t, kNumClasses> with_room_;
  std::map<std::size_t, std::uint32_t>
      chunks_;                            // offset, bits of used granules
  std::map<std::uint32_t, Blocks> lean_;  // live blocks of lean spans
  std::size_t num_empty_chunks_ = 0;
  std::size_t num_spans_ = 0;
  std::size_t out_bytes_ = 0;
};

}  // namespace zinf
