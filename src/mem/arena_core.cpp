#include "src/mem/arena_core.h"

#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "src/mem/arena_registry.h"
#include "zinf/bytes.h"

namespace zinf {

constinit thread_local std::array<CacheSlot, kMaxArenas> thread_slots = {};
constinit thread_local std::atomic<bool> in_fast_path = false;

namespace {

// The range itself begins at no more.
constexpr std::size_t kMaxAlignment = kHugePage;

// A callback that keeps saying that it made room, and did not, must not hang
// the caller.
constexpr int kMaxPressureCalls = 64;

Status check_request(std::size_t bytes, std::size_t alignment) {
  if (bytes > kAddressSpaceBytes) {
    return Status::error(
        Code::kInvalid,
        strf("allocate %s: more than a process can address (%s)",
             format_bytes(bytes).c_str(),
             format_bytes(kAddressSpaceBytes).c_str()));
  }
  if (!std::has_single_bit(alignment) || alignment > kMaxAlignment) {
    return Status::error(Code::kInvalid,
                         strf("allocate with alignment %zu: not a power of two "
                              "up to %zu",
                              alignment, kMaxAlignment));
  }
  return {};
}

// Runs a barrier on every thread of the process; false where the kernel, or a
// sandbox, does not do that.
bool run_barrier_everywhere() {
  auto membarrier = [](int command) {
    return syscall(SYS_membarrier, command, 0, 0) == 0;
  };
  // A process that is not registered is refused: a child of fork() may not be.
  return membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) ||
         (membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) &&
          membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED));
}

}  // namespace

Result<std::unique_ptr<ArenaCore>> ArenaCore::create(ArenaOptions options,
                                                     std::size_t slot,
                                                     std::uint64_t generation) {
  if (options.reserve_bytes > kAddressSpaceBytes / 4) {
    return Status::error(Code::kInvalid,
                         strf("arena: a reserve of %s is more than %s",
                              format_bytes(options.reserve_bytes).c_str(),
                              format_bytes(kAddressSpaceBytes / 4).c_str()));
  }
  std::optional<Reservation> reservation;
  if (options.budget != nullptr) {
    ZINF_ASSIGN(reservation, options.budget->reserve(options.tag, 0));
  }
  std::size_t reserve_bytes = options.reserve_bytes != 0
                                  ? options.reserve_bytes
                                  : decent_reserve_bytes();
  ZINF_ASSIGN(PageHeap pages,
              PageHeap::create(reserve_bytes, std::move(reservation)));
  ZINF_ASSIGN(VirtualRange small_tables,
              SmallHeap::allocate_tables(pages.reserved_bytes()));
  ZINF_ASSIGN(
      VirtualRange large_table,
      VirtualRange::allocate(
          pages.reserved_bytes() / kPage * sizeof(std::uint64_t), kPage));
  return std::unique_ptr<ArenaCore>(new ArenaCore(
      std::move(options), std::move(pages), std::move(small_tables),
      std::move(large_table), slot, generation));
}

ArenaCore::ArenaCore(ArenaOptions options, PageHeap pages,
                     VirtualRange small_tables, VirtualRange large_table,
                     std::size_t slot, std::uint64_t generation)
    : base_(pages.base()),
      reserved_bytes_(pages.reserved_bytes()),
      class_map_(reinterpret_cast<const std::uint8_t*>(small_tables.base())),
      slot_(slot),
      birth_generation_(generation),
      generation_(generation),
      on_pressure_(std::move(options.on_pressure)),
      pages_(std::move(pages)),
      small_(pages_, std::move(small_tables)),
      large_table_range_(std::move(large_table)),
      large_table_(
          reinterpret_cast<std::uint64_t*>(large_table_range_.base())) {
  ZINF_CHECK(class_map_ == small_.class_map(), "the class map moved");
}

std::size_t ArenaCore::offset_of(const void* block) const {
  auto offset =
      static_cast<std::size_t>(static_cast<const std::byte*>(block) - base_);
  ZINF_DCHECK(offset < reserved_bytes_, "%p is not of this arena", block);
  return offset;
}

void* ArenaCore::allocate_or_null(std::size_t bytes, std::size_t alignment) {
  Result<void*> block = try_allocate(bytes, alignment, OnRefusal::kFail);
  return block.ok() ? *block : nullptr;
}

Result<void*> ArenaCore::try_allocate(std::size_t bytes, std::size_t alignment,
                                      OnRefusal on_refusal) {
  ZINF_TRY(check_request(bytes, alignment));
  unsigned size_class = size_class_of(bytes, alignment);
  auto attempt = [&](OnRefusal mode) {
    return size_class != 0 ? allocate_small(size_class, mode)
                           : allocate_large(bytes, alignment, mode);
  };
  for (int calls = 0;; ++calls) {
    Result<void*> block = attempt(OnRefusal::kFail);
    if (block.ok() || block.status().code() != Code::kOverBudget) return block;
    // What compacting frees another thread may take first: its states can
    // leave.
    auto ask = [&] {
      return on_pressure_ && calls < kMaxPressureCalls &&
             on_pressure_(align_up(bytes, kHugePage));
    };
    if (ask()) continue;
    block = allocate_compact(size_class, bytes, alignment);
    if (block.ok() || block.status().code() != Code::kOverBudget) return block;
    if (ask()) continue;
    return on_refusal == OnRefusal::kFail ? block : attempt(on_refusal);
  }
}

// See Note [Compacting] in page_heap.h.
Result<void*> ArenaCore::allocate_compact(unsigned size_class,
                                          std::size_t bytes,
                                          std::size_t alignment) {
  MutexLock lock(mutex_);
  auto attempt = [&]() ZINF_REQUIRES(mutex_) {
    return size_class != 0
               ? take_small_locked(size_class, bytes, alignment)
               : take_large_locked(bytes, alignment, OnRefusal::kCompact);
  };
  flush_all_locked();
  small_.release_empty_chunks();
  Result<void*> block = attempt();
  while (!block.ok() && block.status().code() == Code::kOverBudget &&
         small_.discard_free_pages(align_up(bytes, kHugePage)) > 0) {
    block = attempt();
  }
  return block;
}

// A block of pages where there is no room for a span.
Result<void*> ArenaCore::take_small_locked(unsigned size_class,
                                           std::size_t bytes,
                                           std::size_t alignment) {
  Result<FreeBlock*> block = small_.take_compact(size_class, alignment);
  if (!block.ok()) {
    return take_large_locked(bytes, alignment, OnRefusal::kCompact);
  }
  FreeBlock::clear_mark(*block);
  unpoison(*block, kSizeClasses[size_class].bytes);
  note_high_locked();
  return *block;
}

Result<void*> ArenaCore::allocate_small(unsigned size_class,
                                        OnRefusal on_refusal) {
  MutexLock lock(mutex_);
  ThreadCache* cache = attach_thread_locked();
  if (cache != nullptr) {
    if (void* block = cache->pop(size_class)) return block;
  }
  std::uint32_t wanted = cache != nullptr ? kSizeClasses[size_class].batch : 1;
  ZINF_ASSIGN(BlockList blocks, small_.take(size_class, wanted, on_refusal));
  FreeBlock* block = blocks.head;
  BlockList rest{FreeBlock::next_of(block), blocks.count - 1};
  FreeBlock::clear_mark(block);
  if (cache != nullptr) cache->refill(size_class, rest);
  unpoison(block, kSizeClasses[size_class].bytes);
  note_high_locked();
  return block;
}

Result<void*> ArenaCore::allocate_large(std::size_t bytes,
                                        std::size_t alignment,
                                        OnRefusal on_refusal) {
  MutexLock lock(mutex_);
  return take_large_locked(bytes, alignment, on_refusal);
}

Result<void*> ArenaCore::take_large_locked(std::size_t bytes,
                                           std::size_t alignment,
                                           OnRefusal on_refusal) {
  bytes = std::max<std::size_t>(bytes, 1);
  ZINF_ASSIGN(std::size_t offset,
              pages_.allocate(align_up(bytes, kPage),
                              std::max(alignment, kPage), on_refusal));
  large_table_[offset / kPage] = bytes;
  large_bytes_ += bytes;
  ++num_large_;
  note_high_locked();
  return base_ + offset;
}

void ArenaCore::free_slow(void* block, unsigned size_class) {
  bool orphaned = false;
  {
    MutexLock lock(mutex_);
    if (size_class != 0) {
      free_small_locked(block, size_class);
    } else {
      free_large_locked(block);
    }
    orphaned = generation_.load(std::memory_order_relaxed) == kOrphan;
  }
  // Without this core: it may be gone as soon as the lock is.
  if (orphaned) arena_registry::sweep();
}

void ArenaCore::free_small_locked(void* pointer, unsigned size_class) {
  auto* block = static_cast<FreeBlock*>(pointer);
  // A thread that only frees needs a cache too, or it would always come here.
  ThreadCache* cache = attach_thread_locked();
  if (FreeBlock::mark_of(block) == base_) {
    bool cached = cache != nullptr && cache->contains(size_class, block);
    ZINF_CHECK(!cached && !small_.is_free(block),
               "free of %p: it is free already", pointer);
  }
  poison(block, kSizeClasses[size_class].bytes);
  FreeBlock::link(block, nullptr, base_);
  small_.give({block, 1});
  if (cache != nullptr) {
    small_.give(cache->drain(size_class, kSizeClasses[size_class].batch));
  }
}

void ArenaCore::free_large_locked(void* block) {
  std::size_t offset = offset_of(block);
  std::uint64_t bytes =
      is_aligned(offset, kPage) ? large_table_[offset / kPage] : 0;
  ZINF_CHECK(bytes != 0,
             "free of %p: no live block begins there (freed twice, or not the "
             "pointer that allocate gave)",
             block);
  large_table_[offset / kPage] = 0;
  large_bytes_ -= bytes;
  --num_large_;
  pages_.free(offset, align_up(std::size_t{bytes}, kPage));
}

std::size_t ArenaCore::trim() {
  MutexLock lock(mutex_);
  if (ThreadCache* cache = own_cache()) flush_locked(*cache);
  small_.release_empty_chunks();
  return pages_.purge(reserved_bytes_);
}

std::size_t ArenaCore::compact(std::size_t bytes) {
  MutexLock lock(mutex_);
  flush_all_locked();
  small_.release_empty_chunks();
  std::size_t given = pages_.purge_small(bytes);
  if (given >= bytes) return given;
  return given + small_.discard_free_pages(bytes - given);
}

ArenaStats ArenaCore::stats() const {
  MutexLock lock(mutex_);
  const PageHeapStats& pages = pages_.stats();
  ArenaStats stats;
  stats.cached_bytes = cached_bytes_locked();
  stats.live_bytes = large_bytes_ + small_.out_bytes() - stats.cached_bytes;
  stats.live_high_bytes = std::max(live_high_bytes_, stats.live_bytes);
  stats.committed_bytes = pages.committed_bytes;
  stats.committed_high_bytes = pages.committed_high_bytes;
  stats.waste_at_high_bytes =
      stats.committed_high_bytes -
      std::min(stats.committed_high_bytes, stats.live_high_bytes);
  stats.reserved_bytes = reserved_bytes_;
  stats.fresh_bytes = pages.fresh_bytes;
  stats.purged_bytes = pages.purged_bytes;
  stats.num_large_blocks = num_large_;
  stats.num_spans = small_.num_spans();
  stats.num_free_ranges = pages_.num_free_ranges();
  return stats;
}

ThreadCache* ArenaCore::own_cache() const {
  const CacheSlot& slot = thread_slots[slot_];
  return slot.generation == birth_generation_ ? slot.cache : nullptr;
}

ThreadCache* ArenaCore::attach_thread_locked() {
  if (ThreadCache* cache = own_cache()) return cache;
  bool orphaned = generation_.load(std::memory_order_relaxed) == kOrphan;
  if (orphaned || !arena_registry::watch_thread_exit()) return nullptr;
  caches_.push_back({std::make_unique<ThreadCache>(base_), &in_fast_path});
  ThreadCache* cache = caches_.back().cache.get();
  thread_slots[slot_] = {birth_generation_, cache};
  return cache;
}

void ArenaCore::retire(ThreadCache* cache) {
  MutexLock lock(mutex_);
  flush_locked(*cache);
  std::erase_if(caches_,
                [&](const auto& held) { return held.cache.get() == cache; });
}

void ArenaCore::flush_locked(ThreadCache& cache) {
  for (unsigned i = 1; i < kNumClasses; ++i) {
    small_.give(cache.drain(i, kSizeClasses[i].cached));
  }
}

// See Note [Taking caches].
void ArenaCore::flush_all_locked() {
  ThreadCache* own = own_cache();
  if (own != nullptr) flush_locked(*own);
  bool others = std::any_of(caches_.begin(), caches_.end(), [&](auto& held) {
    return held.cache.get() != own && held.cache->held_bytes() > 0;
  });
  if (!others) return;
  std::uint64_t generation = generation_.load(std::memory_order_relaxed);
  generation_.store(kPaused, std::memory_order_relaxed);
  if (run_barrier_everywhere()) {
    for (const Cache& held : caches_) {
      if (held.cache.get() == own || held.in_use == nullptr) continue;
      while (held.in_use->load(std::memory_order_acquire)) sched_yield();
      flush_locked(*held.cache);
    }
  }
  generation_.store(generation, std::memory_order_release);
}

void ArenaCore::forget_other_threads() {
  for (Cache& held : caches_) {
    if (held.cache.get() != own_cache()) held.in_use = nullptr;
  }
}

void ArenaCore::orphan() {
  // Outside the lock: it may hold anything, also blocks of this arena.
  on_pressure_ = nullptr;
  MutexLock lock(mutex_);
  if (ThreadCache* cache = own_cache()) flush_locked(*cache);
  generation_.store(kOrphan, std::memory_order_relaxed);
}

bool ArenaCore::is_dead() const {
  if (generation_.load(std::memory_order_relaxed) != kOrphan) return false;
  MutexLock lock(mutex_);
  return num_large_ == 0 && small_.out_bytes() == cached_bytes_locked();
}

std::size_t ArenaCore::cached_bytes_locked() const {
  std::size_t held = 0;
  for (const Cache& each : caches_) held += each.cache->held_bytes();
  return held;
}

void ArenaCore::note_high_locked() {
  std::size_t most = large_bytes_ + small_.out_bytes();
  if (most <= live_high_bytes_) return;
  // The caches are summed up only when they can make a difference.
  live_high_bytes_ = std::max(live_high_bytes_, most - cached_bytes_locked());
}

}  // namespace zinf
