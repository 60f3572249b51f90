#include "src/mem/small_heap.h"

#include <algorithm>
#include <new>

#include "src/base/align.h"
#include "src/base/check.h"

namespace zinf {
namespace {

constexpr std::uint32_t kGranulesPerChunk = kHugePage / kGranule;
static_assert(kGranulesPerChunk == 32, "a chunk's bits are a uint32_t");

// The first run of `count` clear bits, or 32.
std::uint32_t find_clear(std::uint32_t used, std::uint32_t count) {
  std::uint32_t ones = (1u << count) - 1;
  for (std::uint32_t at = 0; at + count <= kGranulesPerChunk; ++at) {
    if ((used >> at & ones) == 0) return at;
  }
  return kGranulesPerChunk;
}

}  // namespace

Result<VirtualRange> SmallHeap::allocate_tables(std::size_t heap_bytes) {
  std::size_t granules = heap_bytes / kGranule;
  return VirtualRange::allocate(
      align_up(granules, kPage) + granules * sizeof(Span), kPage);
}

SmallHeap::SmallHeap(PageHeap& pages, VirtualRange tables)
    : pages_(pages), tables_(std::move(tables)) {
  std::size_t granules = pages_.reserved_bytes() / kGranule;
  class_map_ = reinterpret_cast<std::uint8_t*>(tables_.base());
  spans_ = reinterpret_cast<Span*>(tables_.base() + align_up(granules, kPage));
  with_room_.fill(kNone);
}

Result<BlockList> SmallHeap::take(unsigned size_class, std::uint32_t wanted,
                                  OnRefusal on_refusal) {
  BlockList taken;
  while (taken.count < wanted) {
    std::uint32_t index = with_room_[size_class];
    if (index == kNone) {
      Result<std::uint32_t> room = find_room(size_class, on_refusal);
      if (!room.ok() && taken.count == 0) return room.status();
      if (!room.ok()) break;
      index = *room;
    }
    while (taken.count < wanted && has_room(index)) {
      FreeBlock* block = take_one(index);
      FreeBlock::link(block, taken.head, pages_.base());
      taken.head = block;
      ++taken.count;
    }
    if (!has_room(index)) unlist(index);
  }
  out_bytes_ += std::size_t{taken.count} * kSizeClasses[size_class].bytes;
  return taken;
}

Result<FreeBlock*> SmallHeap::take_compact(unsigned size_class,
                                           std::size_t alignment) {
  constexpr unsigned kDoubling = 8;  // up to twice the size before a span
  unsigned last = std::min(size_class + kDoubling, kNumClasses - 1);
  FreeBlock* block = take_from_class(size_class, last, alignment);
  if (block != nullptr) return block;
  ZINF_TRY(find_room(size_class, OnRefusal::kCompact).status());
  return take_from_class(size_class, size_class, alignment);
}

// From the first of these classes that has a free block, or null.
FreeBlock* SmallHeap::take_from_class(unsigned first, unsigned last,
                                      std::size_t alignment) {
  for (unsigned i = first; i <= last; ++i) {
    std::uint32_t index = with_room_[i];
    std::size_t bytes = kSizeClasses[i].bytes;
    if (index == kNone || !is_aligned(bytes, alignment)) continue;
    FreeBlock* block = take_one(index);
    if (!has_room(index)) unlist(index);
    out_bytes_ += bytes;
    return block;
  }
  return nullptr;
}

// A span of this class with a free block, which is listed.
Result<std::uint32_t> SmallHeap::find_room(unsigned size_class,
                                           OnRefusal on_refusal) {
  for (const auto& [lean, live] : lean_) {
    if (spans_[lean].size_class != size_class) continue;
    if (live.count() == kSizeClasses[size_class].blocks) continue;
    std::uint32_t index = lean;  // restore() takes it from the map
    if (restore(index, on_refusal).ok()) return index;
  }
  return add_span(size_class, on_refusal);
}

// Pays for the pages of a lean span, and links its free blocks.
Status SmallHeap::restore(std::uint32_t index, OnRefusal on_refusal) {
  Span& span = spans_[index];
  std::size_t begin = std::size_t{index} * kGranule;
  std::size_t bytes = kSizeClasses[span.size_class].granules * kGranule;
  ZINF_TRY(pages_.commit_inside({begin, begin + bytes}, on_refusal));
  const Blocks& live = lean_.at(index);
  for (std::uint32_t i = 0; i < span.num_carved; ++i) {
    if (live[i]) continue;
    FreeBlock* block = block_of(index, i);
    FreeBlock::link(block, span.free, pages_.base());
    span.free = block;
  }
  span.lean = false;
  lean_.erase(index);
  list(index);
  return {};
}

std::size_t SmallHeap::discard_free_pages(std::size_t bytes) {
  std::size_t discarded = 0;
  for (auto chunk = chunks_.begin();
       chunk != chunks_.end() && discarded < bytes; ++chunk) {
    discarded += discard_granules(chunk->first, chunk->second);
  }
  for (auto chunk = chunks_.begin();
       chunk != chunks_.end() && discarded < bytes; ++chunk) {
    auto first = static_cast<std::uint32_t>(chunk->first / kGranule);
    for (std::uint32_t at = 0; at < kGranulesPerChunk; ++at) {
      bool begins = (chunk->second >> at & 1) != 0 &&
                    spans_[first + at].granules_back == 0;
      if (begins) discarded += discard_pages_of(first + at);
    }
  }
  return discarded;
}

// What no span of the chunk uses.
std::size_t SmallHeap::discard_granules(std::size_t chunk, std::uint32_t used) {
  std::size_t discarded = 0;
  for (std::uint32_t at = 0; at < kGranulesPerChunk; ++at) {
    if ((used >> at & 1) != 0) continue;
    std::size_t begin = chunk + at * kGranule;
    discarded += pages_.discard_inside({begin, begin + kGranule});
  }
  return discarded;
}

// See Note [Lean spans].
std::size_t SmallHeap::discard_pages_of(std::uint32_t index) {
  Span& span = spans_[index];
  const SizeClass& size = kSizeClasses[span.size_class];
  constexpr std::size_t kPages = kGranule / kPage;
  constexpr std::size_t kMaxGranules = 4;
  Blocks live = span.lean ? lean_.at(index) : live_blocks(index);
  std::bitset<kMaxGranules * kPages> used;
  for (std::uint32_t i = 0; i < span.num_carved; ++i) {
    if (!live[i]) continue;
    std::size_t begin = std::size_t{i} * size.bytes;
    for (std::size_t at = align_down(begin, kPage); at < begin + size.bytes;
         at += kPage) {
      used.set(at / kPage);
    }
  }
  std::size_t discarded = 0;
  std::size_t begin = std::size_t{index} * kGranule;
  for (std::size_t page = 0; page < size.granules * kPages; ++page) {
    if (used[page]) continue;
    std::size_t end = page;
    while (end < size.granules * kPages && !used[end]) ++end;
    discarded +=
        pages_.discard_inside({begin + page * kPage, begin + end * kPage});
    page = end;
  }
  if (discarded == 0 || span.lean) return discarded;
  if (span.listed) unlist(index);
  span.free = nullptr;
  span.lean = true;
  lean_.emplace(index, live);
  return discarded;
}

// REQUIRES: a span that is not lean.
SmallHeap::Blocks SmallHeap::live_blocks(std::uint32_t index) const {
  const Span& span = spans_[index];
  Blocks live;
  for (std::uint32_t i = 0; i < span.num_carved; ++i) live.set(i);
  for (const FreeBlock* free = span.free; free != nullptr;
       free = FreeBlock::next_of(free)) {
    live.reset(number_in_span(free));
  }
  return live;
}

void SmallHeap::give(BlockList blocks) {
  FreeBlock* block = blocks.head;
  for (std::uint32_t i = 0; i < blocks.count; ++i) {
    FreeBlock* next = FreeBlock::next_of(block);
    give_one(block);
    block = next;
  }
}

FreeBlock* SmallHeap::take_one(std::uint32_t index) {
  Span& span = spans_[index];
  if (span.free != nullptr) {
    FreeBlock* block = span.free;
    span.free = FreeBlock::next_of(block);
    --span.num_free;
    return block;
  }
  return block_of(index, span.num_carved++);
}

void SmallHeap::give_one(FreeBlock* block) {
  std::uint32_t index = span_of(block);
  Span& span = spans_[index];
  ZINF_CHECK(span.num_free < span.num_carved,
             "free of %p: its span has no live block (freed twice?)",
             static_cast<void*>(block));
  if (span.lean) {
    lean_.at(index).reset(number_in_span(block));
  } else {
    FreeBlock::link(block, span.free, pages_.base());
    span.free = block;
  }
  out_bytes_ -= kSizeClasses[span.size_class].bytes;
  if (++span.num_free == span.num_carved) {
    remove_span(index);
  } else if (!span.listed && !span.lean) {
    list(index);
  }
}

bool SmallHeap::is_free(const FreeBlock* block) const {
  std::uint32_t index = span_of(block);
  const Span& span = spans_[index];
  if (span.lean) return !lean_.at(index)[number_in_span(block)];
  for (const FreeBlock* free = span.free; free != nullptr;
       free = FreeBlock::next_of(free)) {
    if (free == block) return true;
  }
  return false;
}

Result<std::uint32_t> SmallHeap::add_span(unsigned size_class,
                                          OnRefusal on_refusal) {
  std::uint32_t granules = kSizeClasses[size_class].granules;
  ZINF_ASSIGN(std::size_t offset, take_granules(granules, on_refusal));
  auto index = static_cast<std::uint32_t>(offset / kGranule);
  for (std::uint32_t i = 0; i < granules; ++i) {
    Span* span = new (&spans_[index + i]) Span;
    span->size_class = static_cast<std::uint8_t>(size_class);
    span->granules_back = static_cast<std::uint8_t>(i);
    class_map_[index + i] = static_cast<std::uint8_t>(size_class);
  }
  poison(pages_.base() + offset, granules * kGranule);
  ++num_spans_;
  list(index);
  return index;
}

Result<std::size_t> SmallHeap::take_granules(std::uint32_t count,
                                             OnRefusal on_refusal) {
  std::uint32_t ones = (1u << count) - 1;
  for (auto& [offset, used] : chunks_) {
    std::uint32_t at = find_clear(used, count);
    if (at == kGranulesPerChunk) continue;
    std::size_t begin = offset + at * kGranule;
    ZINF_TRY(
        pages_.commit_inside({begin, begin + count * kGranule}, on_refusal));
    if (used == 0) --num_empty_chunks_;
    used |= ones << at;
    return begin;
  }
  ZINF_ASSIGN(
      std::size_t offset,
      pages_.allocate(kHugePage, kHugePage, count * kGranule, on_refusal));
  chunks_[offset] = ones;
  return offset;
}

void SmallHeap::remove_span(std::uint32_t index) {
  if (spans_[index].listed) unlist(index);
  lean_.erase(index);
  std::uint32_t granules = kSizeClasses[spans_[index].size_class].granules;
  for (std::uint32_t i = 0; i < granules; ++i) class_map_[index + i] = 0;
  --num_spans_;
  std::size_t offset = std::size_t{index} * kGranule;
  auto chunk = chunks_.find(align_down(offset, kHugePage));
  std::uint32_t at = index % kGranulesPerChunk;
  chunk->second &= ~(((1u << granules) - 1) << at);
  if (chunk->second != 0) return;
  // One empty chunk stays: a class that comes and goes must not cost a page
  // fault each time.
  if (num_empty_chunks_ == 0) {
    ++num_empty_chunks_;
    return;
  }
  pages_.free(chunk->first, kHugePage);
  chunks_.erase(chunk);
}

void SmallHeap::release_empty_chunks() {
  for (auto chunk = chunks_.begin(); chunk != chunks_.end();) {
    if (chunk->second != 0) {
      ++chunk;
      continue;
    }
    pages_.free(chunk->first, kHugePage);
    chunk = chunks_.erase(chunk);
  }
  num_empty_chunks_ = 0;
}

bool SmallHeap::has_room(std::uint32_t index) const {
  const Span& span = spans_[index];
  return span.free != nullptr ||
         span.num_carved < kSizeClasses[span.size_class].blocks;
}

void SmallHeap::list(std::uint32_t index) {
  Span& span = spans_[index];
  std::uint32_t& first = with_room_[span.size_class];
  span.previous = kNone;
  span.next = first;
  span.listed = true;
  if (first != kNone) spans_[first].previous = index;
  first = index;
}

void SmallHeap::unlist(std::uint32_t index) {
  Span& span = spans_[index];
  if (span.next != kNone) spans_[span.next].previous = span.previous;
  if (span.previous != kNone) {
    spans_[span.previous].next = span.next;
  } else {
    with_room_[span.size_class] = span.next;
  }
  span.listed = false;
}

FreeBlock* SmallHeap::block_of(std::uint32_t index,
                               std::uint32_t number) const {
  std::size_t bytes = kSizeClasses[spans_[index].size_class].bytes;
  return reinterpret_cast<FreeBlock*>(
      pages_.base() + std::size_t{index} * kGranule + bytes * number);
}

std::uint32_t SmallHeap::number_in_span(const FreeBlock* block) const {
  std::uint32_t index = span_of(block);
  auto offset =
      static_cast<std::size_t>(reinterpret_cast<const std::byte*>(block) -
                               pages_.base() - std::size_t{index} * kGranule);
  return static_cast<std::uint32_t>(
      offset / kSizeClasses[spans_[index].size_class].bytes);
}

std::uint32_t SmallHeap::span_of(const void* block) const {
  auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(block) -
                                         pages_.base());
  auto granule = static_cast<std::uint32_t>(offset / kGranule);
  return granule - spans_[granule].granules_back;
}

}  // namespace zinf
