// The arena's memory in pages of 4 KiB: best fit over one range of addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "src/mem/page_map.h"
#include "src/mem/virtual_range.h"
#include "zinf/budget.h"
#include "zinf/status.h"

namespace zinf {

// What to do when the budget says no and no free huge page is left to give
// back. kCompact: pay for single pages of 4 KiB, and give free ones back.
enum class OnRefusal : std::uint8_t { kFail, kCompact, kExceed };

struct PageHeapStats {
  std::size_t used_bytes = 0;            // handed out
  std::size_t used_high_bytes = 0;       // the most of it
  std::size_t committed_bytes = 0;       // in huge pages the kernel gave us
  std::size_t committed_high_bytes = 0;  // the most of it
  std::uint64_t fresh_bytes = 0;         // ever committed: page faults
  std::uint64_t purged_bytes = 0;        // ever given back
};

// One at a time: the owner's lock protects it. Offsets count from base().
//
// A huge page is committed from the moment a block on it is handed out until it
// is purged, and it is purged as a whole, while no block touches it. Committed
// pages are what the budget pays for. Two rules keep them few: a block goes
// where it needs the fewest fresh pages, and before the committed pages pass
// 1.03 times the most that was ever handed out, free ones are purged.
//
// Note [Compacting]. Blocks of many sizes leave holes in huge pages, and what
// the holes hold depends on all that was ever allocated: a budget that held a
// step once could refuse it later. So an allocation that would be refused
// (kCompact) gives the free 4 KiB pages between blocks back and takes, at
// whatever addresses, only the 4 KiB pages that it needs. Then a block of n
// pages fits whenever n pages of the budget are not in use. Such a huge page is
// split: the kernel no longer makes it huge, until a later allocation commits
// it as a whole or nothing of it is committed.
class PageHeap {
 public:
  // Halves the reservation of addresses until the system agrees. Without a
  // reservation (of 0 bytes, to be grown) nothing is counted anywhere.
  static Result<PageHeap> create(std::size_t reserve_bytes,
                                 std::optional<Reservation> reservation);
  PageHeap(PageHeap&&) = default;
  PageHeap& operator=(PageHeap&&) = delete;
  ~PageHeap();

  std::byte* base() const { return range_.base(); }
  std::size_t reserved_bytes() const { return range_.bytes(); }
  std::size_t num_free_ranges() const { return by_begin_.size(); }
  const PageHeapStats& stats() const { return stats_; }

  // `bytes` is a multiple of 4 KiB, alignment a power of two. kOverBudget when
  // the budget, the addresses or the system's memory do not hold it, after
  // purging did not help.
  Result<std::size_t> allocate(std::size_t bytes, std::size_t alignment,
                               OnRefusal on_refusal) {
    return allocate(bytes, alignment, bytes, on_refusal);
  }
  // The same; with kCompact only the first `commit_bytes` are committed, the
  // rest when commit_inside() asks for it.
  Result<std::size_t> allocate(std::size_t bytes, std::size_t alignment,
                               std::size_t commit_bytes, OnRefusal on_refusal);

  // Pages stay committed for the next block.
  void free(std::size_t offset, std::size_t bytes);

  // A part of an allocated extent that discard_inside() may have given back.
  Status commit_inside(Extent extent, OnRefusal on_refusal);
  // Gives a part of an allocated extent, inside one huge page, back to the
  // system; returns the bytes given back.
  std::size_t discard_inside(Extent extent);

  // Gives free pages back to the system until `bytes` of them are; returns how
  // many were.
  std::size_t purge(std::size_t bytes) { return purge(bytes, Extent{}); }
  // The same, and after the huge pages single ones: see Note [Compacting].
  std::size_t purge_small(std::size_t bytes) {
    return purge_small(bytes, Extent{});
  }

 private:
  struct Place {
    Extent extent = {};
    Extent commit = {};  // of it, what is to be committed
    std::size_t range_begin = 0;
    std::size_t range_bytes = 0;
    std::size_t fresh_bytes = 0;
  };
  // What is asked for, in huge pages or, with kCompact, in small ones.
  struct Request {
    std::size_t bytes = 0;
    std::size_t alignment = 0;
    std::size_t commit_bytes = 0;
    bool small_pages = false;
  };

  PageHeap(VirtualRange range, std::optional<Reservation> reservation);

  std::optional<Place> find(const Request& request) const;
  Place place_in(Extent range, const Request& request) const;
  Place place_at(std::size_t begin, const Request& request) const;
  Status commit(const Place& place, OnRefusal on_refusal);
  Status commit_small(Extent extent);
  Status reserve(const Place& place, OnRefusal on_refusal);
  void note_committed(std::size_t fresh_bytes);
  void note_purged(std::size_t bytes);
  void note_changed();
  Status make_writable(std::size_t end);
  std::size_t purge(std::size_t bytes, Extent keep);
  std::size_t purge_inside(Extent pages, std::size_t bytes);
  std::size_t purge_small(std::size_t bytes, Extent keep);
  std::size_t discard_small(Extent extent);
  // False when the system cannot keep one more range of addresses apart.
  bool advise_small(Extent huge_page);
  bool split(Extent huge_page);
  void advise_huge(Extent pages);
  void add_range(Extent range);
  void remove_range(std::size_t begin, std::size_t bytes);

  VirtualRange range_;
  std::optional<Reservation> reservation_;  // pays for the committed pages
  std::size_t writable_end_ = 0;
  PageMap committed_;
  bool all_small_ = false;  // no page is huge: too many are split
  std::map<std::size_t, std::size_t> by_begin_;  // free ranges: begin, bytes
  std::set<std::pair<std::size_t, std::size_t>> by_size_;  // bytes, begin
  PageHeapStats stats_;
};

}  // namespace zinf
