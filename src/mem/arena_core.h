// What is behind an Arena, and outlives it while blocks are live.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "src/base/mutex.h"
#include "src/mem/page_heap.h"
#include "src/mem/size_class.h"
#include "src/mem/small_heap.h"
#include "src/mem/thread_cache.h"
#include "zinf/arena.h"

namespace zinf {

inline constexpr std::size_t kMaxArenas = 8;

// A thread's cache in the arena with this generation; a stale one belongs to an
// arena that is gone and must not be touched.
struct CacheSlot {
  std::uint64_t generation;
  ThreadCache* cache;
};

// Initial-exec: found without a call. 128 bytes fit in what glibc keeps for
// libraries that are loaded later.
extern constinit thread_local std::array<CacheSlot, kMaxArenas> thread_slots
    [[gnu::tls_model("initial-exec")]];

// Whether the thread is in a fast path, and may be using one of its caches.
//
// Note [Taking caches]. An allocation that would be refused takes the free
// blocks of all threads' caches, also of threads that sleep. It holds the
// arena's lock, makes generation_ kPaused, and has the kernel run a barrier on
// every thread (membarrier): from then on a thread is seen to be in a fast path
// or sees kPaused, and takes the slow path, where it waits for the lock. So the
// fast paths pay for two stores and no barrier of their own.
extern constinit thread_local std::atomic<bool> in_fast_path
    [[gnu::tls_model("initial-exec")]];

// In a fast path while it lives.
class FastPath {
 public:
  FastPath() {
    in_fast_path.store(true, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  ~FastPath() { in_fast_path.store(false, std::memory_order_release); }
  FastPath(const FastPath&) = delete;
  FastPath& operator=(const FastPath&) = delete;
};

// Thread-safe. Made and destroyed by arena_registry.h.
//
// Fast paths compare the thread's slot with generation_ and then touch the
// thread's own cache only; all else is under mutex_. When the handle goes,
// generation_ becomes kOrphan, so that every later free takes the lock and the
// last one is noticed.
class ArenaCore {
 public:
  static constexpr std::uint64_t kOrphan = ~std::uint64_t{0};
  static constexpr std::uint64_t kPaused = kOrphan - 1;

  // The slot and a generation that was never used before come from the
  // registry.
  static Result<std::unique_ptr<ArenaCore>> create(ArenaOptions options,
                                                   std::size_t slot,
                                                   std::uint64_t generation);
  ArenaCore(const ArenaCore&) = delete;
  ArenaCore& operator=(const ArenaCore&) = delete;

  std::byte* base() const { return base_; }
  std::size_t reserved_bytes() const { return reserved_bytes_; }
  std::uint64_t birth_generation() const { return birth_generation_; }

  void* allocate(std::size_t bytes, std::size_t alignment) {
    if (bytes <= kMaxSmallBytes && alignment <= kMinAlignment) [[likely]] {
      if (void* block = pop_cached(size_class_of(bytes))) [[likely]]
        return block;
    }
    return allocate_or_null(bytes, alignment);
  }

  void free(void* block) {
    std::size_t offset = offset_of(block);
    unsigned size_class = class_map_[offset / kGranule];
    if (size_class != 0 && push_cached(size_class, block)) [[likely]]
      return;
    free_slow(block, size_class);
  }

  Result<void*> try_allocate(std::size_t bytes, std::size_t alignment,
                             OnRefusal on_refusal) ZINF_EXCLUDES(mutex_);
  std::size_t trim() ZINF_EXCLUDES(mutex_);
  std::size_t compact(std::size_t bytes) ZINF_EXCLUDES(mutex_);
  ArenaStats stats() const ZINF_EXCLUDES(mutex_);

  // Takes the calling thread's cache back; `cache` was made by this arena.
  void retire(ThreadCache* cache) ZINF_EXCLUDES(mutex_);

  // The handle is gone. From now on is_dead() says whether a block is live.
  void orphan() ZINF_EXCLUDES(mutex_);
  bool is_dead() const ZINF_EXCLUDES(mutex_);

  void lock_for_fork() ZINF_THREAD_ANNOTATION(no_thread_safety_analysis) {
    mutex_.lock();
  }
  void unlock_after_fork() ZINF_THREAD_ANNOTATION(no_thread_safety_analysis) {
    mutex_.unlock();
  }
  // The other threads of the parent are not in this process. REQUIRES the lock.
  void forget_other_threads() ZINF_THREAD_ANNOTATION(no_thread_safety_analysis);

 private:
  ArenaCore(ArenaOptions options, PageHeap pages, VirtualRange small_tables,
            VirtualRange large_table, std::size_t slot,
            std::uint64_t generation);

  // A thread's cache, and how others see whether the thread is using it; null
  // for a thread of the parent before a fork.
  struct Cache {
    std::unique_ptr<ThreadCache> cache;
    const std::atomic<bool>* in_use = nullptr;
  };

  // Acquire, for what a thread that took the caches did to this one. A thread
  // that does not yet see kOrphan is what the Note in thread_cache.h is about.
  void* pop_cached(unsigned size_class) {
    FastPath fast;
    const CacheSlot& slot = thread_slots[slot_];
    return slot.generation == generation_.load(std::memory_order_acquire)
               ? slot.cache->pop(size_class)
               : nullptr;
  }
  bool push_cached(unsigned size_class, void* block) {
    FastPath fast;
    const CacheSlot& slot = thread_slots[slot_];
    return slot.generation == generation_.load(std::memory_order_acquire) &&
           slot.cache->push(size_class, block);
  }

  std::size_t offset_of(const void* block) const;
  void* allocate_or_null(std::size_t bytes, std::size_t alignment);
  Result<void*> allocate_small(unsigned size_class, OnRefusal on_refusal);
  Result<void*> allocate_large(std::size_t bytes, std::size_t alignment,
                               OnRefusal on_refusal);
  Result<void*> allocate_compact(unsigned size_class, std::size_t bytes,
                                 std::size_t alignment);
  Result<void*> take_small_locked(unsigned size_class, std::size_t bytes,
                                  std::size_t alignment) ZINF_REQUIRES(mutex_);
  Result<void*> take_large_locked(std::size_t bytes, std::size_t alignment,
                                  OnRefusal on_refusal) ZINF_REQUIRES(mutex_);
  void free_slow(void* block, unsigned size_class);
  void free_small_locked(void* block, unsigned size_class)
      ZINF_REQUIRES(mutex_);
  void free_large_locked(void* block) ZINF_REQUIRES(mutex_);
  ThreadCache* attach_thread_locked() ZINF_REQUIRES(mutex_);
  ThreadCache* own_cache() const;
  void flush_locked(ThreadCache& cache) ZINF_REQUIRES(mutex_);
  void flush_all_locked() ZINF_REQUIRES(mutex_);
  std::size_t cached_bytes_locked() const ZINF_REQUIRES(mutex_);
  void note_high_locked() ZINF_REQUIRES(mutex_);

  // Const after construction; the first line is what fast paths read.
  std::byte* const base_;
  const std::size_t reserved_bytes_;
  const std::uint8_t* const class_map_;
  const std::size_t slot_;
  const std::uint64_t birth_generation_;

  // Own synchronisation.
  // kOrphan when the handle is gone, kPaused while caches are taken.
  std::atomic<std::uint64_t> generation_;

  // Const until the handle is gone.
  std::function<bool(std::size_t)> on_pressure_;

  mutable Mutex mutex_;
  PageHeap pages_ ZINF_GUARDED_BY(mutex_);
  SmallHeap small_ ZINF_GUARDED_BY(mutex_);
  const VirtualRange large_table_range_;
  // Requested bytes of the large block that begins at each 4 KiB page, 0 where
  // none does.
  std::uint64_t* const large_table_;
  std::vector<Cache> caches_ ZINF_GUARDED_BY(mutex_);
  std::size_t large_bytes_ ZINF_GUARDED_BY(mutex_) = 0;
  std::size_t num_large_ ZINF_GUARDED_BY(mutex_) = 0;
  std::size_t live_high_bytes_ ZINF_GUARDED_BY(mutex_) = 0;
};

}  // namespace zinf
