// The arenas of the process. Process-wide because what it serves is: a pointer
// is freed without its arena at hand, threads end, processes fork.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "src/base/align.h"
#include "src/mem/arena_core.h"
#include "zinf/status.h"

// Thread-safe. Lock order: the registry's mutex, then the arenas'.
namespace zinf::arena_registry {

// A range of addresses in one word (both ends are multiples of 2 MiB), so that
// a reader never sees half of a change. 0: no arena.
struct Entry {
  std::atomic<std::uint64_t> range;
  std::atomic<ArenaCore*> core;

  static constexpr int kSizeBits = 28;
  static std::uint64_t pack(const std::byte* base, std::size_t bytes) {
    auto begin = reinterpret_cast<std::uintptr_t>(base) / kHugePage;
    return begin << kSizeBits | bytes / kHugePage;
  }
  bool holds(std::uintptr_t address) const {
    // Relaxed: whoever holds a live block learnt of it after this was stored.
    std::uint64_t packed = range.load(std::memory_order_relaxed);
    std::uint64_t size = packed & ((std::uint64_t{1} << kSizeBits) - 1);
    return address / kHugePage - (packed >> kSizeBits) < size;
  }
};
extern constinit Entry entries[kMaxArenas];

// The arena that a live block is of; null for other addresses.
inline ArenaCore* find(const void* address) {
  auto value = reinterpret_cast<std::uintptr_t>(address);
  for (const Entry& entry : entries) {
    if (entry.holds(value)) return entry.core.load(std::memory_order_relaxed);
  }
  return nullptr;
}

Result<ArenaCore*> create(ArenaOptions options);

// The handle is gone; the core goes now or with its last block.
void release(ArenaCore* core);

// Destroys the cores that have neither handle nor live block.
void sweep();

// Has the calling thread's caches given back when it ends. False when it is
// already ending: then it must not have any.
bool watch_thread_exit();

}  // namespace zinf::arena_registry
