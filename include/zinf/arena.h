// An allocator for tensors: one range of addresses, little waste, and pages
// that go back to the system.
//
// Small blocks (up to 32 KiB) come from size classes through a cache per
// thread and cost about as much as malloc's. Larger ones fit exactly, in steps
// of 4 KiB. Memory is private and anonymous, in huge pages where the system
// gives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "zinf/budget.h"
#include "zinf/status.h"

namespace zinf {

struct ArenaOptions {
  // Pays for the pages that the arena holds; it is asked for 2 MiB at a time,
  // and for 4 KiB at a time where it would refuse.
  // Null: nobody counts. Need not outlive create().
  const Budget* budget = nullptr;
  Tag tag = Tag::kTensor;

  // Called, without any lock and with whole pages of 2 MiB, when the budget
  // refuses and purging was not enough: give memory back and return true, then
  // the allocation tries again; or return false, then it compacts the arena,
  // and asks once more before it fails. It may free blocks of this arena, but
  // must not allocate from it.
  std::function<bool(std::size_t wanted_bytes)> on_pressure = {};

  // Addresses to reserve, rounded to 2 MiB; no memory. 0: four times the
  // physical memory. Less is taken where the system refuses (RLIMIT_AS).
  std::size_t reserve_bytes = 0;
};

// A snapshot. Bytes are the caller's for large blocks, the size class's for
// small ones.
struct ArenaStats {
  std::size_t live_bytes = 0;
  std::size_t live_high_bytes = 0;
  std::size_t committed_bytes = 0;  // pages that may hold memory
  std::size_t committed_high_bytes = 0;
  std::size_t waste_at_high_bytes = 0;  // the difference of the two highs
  std::size_t cached_bytes = 0;         // free blocks in threads' caches
  std::size_t reserved_bytes = 0;       // addresses
  std::uint64_t fresh_bytes = 0;        // pages ever taken from the system
  std::uint64_t purged_bytes = 0;       // pages ever given back
  std::size_t num_large_blocks = 0;     // live
  std::size_t num_spans = 0;            // of small blocks
  std::size_t num_free_ranges = 0;
};

// Thread-safe; blocks may be freed on any thread. Move-only. Blocks may outlive
// the Arena: its memory goes with the last of them. After fork() the child has
// its own copy of everything and may allocate and free. At most 8 arenas exist
// at a time.
class Arena {
 public:
  static constexpr std::size_t kDefaultAlignment = 64;

  // kInvalid for a reservation beyond the address space; the system's error
  // when it does not even give 16 MiB of addresses.
  static Result<Arena> create(ArenaOptions options = {});
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The memory is not initialised. Zero bytes give a block like any other.
  // Alignment is a power of two up to 2 MiB; every block has at least 64 bytes
  // of it.
  // Null where try_allocate() would give a Status.
  void* allocate(std::size_t bytes, std::size_t alignment = kDefaultAlignment);

  // kOverBudget when the budget, the addresses or the system's memory do not
  // hold it; kInvalid for more than the address space or a wrong alignment.
  Result<void*> try_allocate(std::size_t bytes,
                             std::size_t alignment = kDefaultAlignment);

  // Rather exceeds the budget than fails: for a caller that cannot be refused.
  Result<void*> allocate_beyond_budget(
      std::size_t bytes, std::size_t alignment = kDefaultAlignment);

  // A block of any arena, also of one that is gone; null is nothing. A pointer
  // that is no live block ends the program where that is noticed: foreign
  // addresses and double frees of large blocks always, double frees of small
  // blocks nearly always.
  static void free(void* block);

  // Whether the address lies in this arena's range.
  bool owns(const void* address) const;

  // Gives all free pages back to the system, and the calling thread's cache to
  // the arena first; returns the bytes given back. Other threads' caches stay
  // (at most 5 MiB each, when it uses all sizes).
  std::size_t trim();

  // Gives at least so many bytes back to the system if there are any: after
  // free pages of 2 MiB those of 4 KiB between blocks, and every thread's
  // cache. Returns how many. An allocation that would be refused does the same
  // by itself, so it fails only when what is live leaves no room.
  std::size_t compact(std::size_t bytes);

  ArenaStats stats() const;

 private:
  explicit Arena(class ArenaCore* core) : core_(core) {}

  class ArenaCore* core_;
};

}  // namespace zinf
