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

// What to do when the budget says no and nothing is left to give back.
enum class OnRefusal : std::uint8_t { kFail, kExceed };

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
// is purged, and it can be purged only while no block touches it: discarding a
// part of a huge page frees no memory. Committed pages are what the budget
// pays for. Two rules keep them few: a block goes where it needs the fewest
// fresh pages, and before the committed pages pass 1.03 times the most that was
// ever handed out, free ones are purged.
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
                               OnRefusal on_refusal);

  // Pages stay committed for the next block.
  void free(std::size_t offset, std::size_t bytes);

  // Gives free pages back to the system until `bytes` of them are; returns how
  // many were.
  std::size_t purge(std::size_t bytes) { return purge(bytes, Extent{}); }

 private:
  struct Place {
    Extent extent = {};
    std::size_t range_begin = 0;
    std::size_t range_bytes = 0;
    std::size_t fresh_bytes = 0;
  };

  PageHeap(VirtualRange range, std::optional<Reservation> reservation);

  std::optional<Place> find(std::size_t bytes, std::size_t alignment) const;
  Place place_in(Extent range, std::size_t bytes, std::size_t alignment) const;
  Status commit(const Place& place, OnRefusal on_refusal);
  Status reserve(const Place& place, OnRefusal on_refusal);
  Status make_writable(std::size_t end);
  std::size_t purge(std::size_t bytes, Extent keep);
  std::size_t purge_inside(Extent pages, std::size_t bytes);
  void add_range(Extent range);
  void remove_range(std::size_t begin, std::size_t bytes);

  VirtualRange range_;
  std::optional<Reservation> reservation_;  // pays for the committed pages
  std::size_t writable_end_ = 0;
  PageMap committed_;
  std::map<std::size_t, std::size_t> by_begin_;  // free ranges: begin, bytes
  std::set<std::pair<std::size_t, std::size_t>> by_size_;  // bytes, begin
  PageHeapStats stats_;
};

}  // namespace zinf
