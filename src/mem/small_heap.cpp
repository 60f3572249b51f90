#include "src/mem/small_heap.h"

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
      Result<std::uint32_t> added = add_span(size_class, on_refusal);
      if (!added.ok() && taken.count == 0) return added.status();
      if (!added.ok()) break;
      index = *added;
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
  std::byte* begin = pages_.base() + std::size_t{index} * kGranule;
  std::size_t bytes = kSizeClasses[span.size_class].bytes;
  return reinterpret_cast<FreeBlock*>(begin + bytes * span.num_carved++);
}

void SmallHeap::give_one(FreeBlock* block) {
  std::uint32_t index = span_of(block);
  Span& span = spans_[index];
  ZINF_CHECK(span.num_free < span.num_carved,
             "free of %p: its span has no live block (freed twice?)",
             static_cast<void*>(block));
  FreeBlock::link(block, span.free, pages_.base());
  span.free = block;
  out_bytes_ -= kSizeClasses[span.size_class].bytes;
  if (++span.num_free == span.num_carved) {
    remove_span(index);
  } else if (!span.listed) {
    list(index);
  }
}

bool SmallHeap::is_free(const FreeBlock* block) const {
  const Span& span = spans_[span_of(block)];
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
    if (used == 0) --num_empty_chunks_;
    used |= ones << at;
    return offset + at * kGranule;
  }
  ZINF_ASSIGN(std::size_t offset,
              pages_.allocate(kHugePage, kHugePage, on_refusal));
  chunks_[offset] = ones;
  return offset;
}

void SmallHeap::remove_span(std::uint32_t index) {
  if (spans_[index].listed) unlist(index);
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

std::uint32_t SmallHeap::span_of(const void* block) const {
  auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(block) -
                                         pages_.base());
  auto granule = static_cast<std::uint32_t>(offset / kGranule);
  return granule - spans_[granule].granules_back;
}

}  // namespace zinf
