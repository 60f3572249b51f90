#include "src/mem/page_heap.h"

#include <algorithm>
#include <iterator>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "src/mem/poison.h"
#include "zinf/bytes.h"

namespace zinf {
namespace {

constexpr std::size_t kMinReserve = 16 * kMiB;

// Addresses become writable in steps: one system call for many blocks.
constexpr std::size_t kWritableStep = 32 * kMiB;

// How far a search by size looks beyond the best fit for a place that needs
// fewer fresh pages.
constexpr int kMaxCandidates = 256;

// A split page needs up to two ranges of addresses of its own, and a process
// has 65,530 of them (vm.max_map_count): with more than this the arena does
// without huge pages, until none is split.
constexpr std::size_t kMaxSplit = 8192;

// Committed pages may exceed the most that was handed out by 3 %; below that
// free pages are kept, since taking one from the system costs 0.06 s/GB even
// with huge pages (0.5 without).
constexpr std::size_t soft_limit(std::size_t used_high) {
  return align_up(used_high + used_high / 32, kHugePage) + kHugePage;
}

}  // namespace

Result<PageHeap> PageHeap::create(std::size_t reserve_bytes,
                                  std::optional<Reservation> reservation) {
  std::size_t wanted =
      std::max(align_down(reserve_bytes, kHugePage), kMinReserve);
  while (true) {
    Result<VirtualRange> range = VirtualRange::reserve(wanted, kHugePage);
    if (range.ok()) {
      return PageHeap(std::move(range).value(), std::move(reservation));
    }
    if (wanted / 2 < kMinReserve) return range.status().in("arena");
    wanted = align_down(wanted / 2, kHugePage);
  }
}

PageHeap::PageHeap(VirtualRange range, std::optional<Reservation> reservation)
    : range_(std::move(range)),
      reservation_(std::move(reservation)),
      committed_(range_.bytes()) {
  add_range({0, range_.bytes()});
}

PageHeap::~PageHeap() {
  // The next owner of these addresses must not meet our poison.
  if (range_.base() != nullptr) unpoison(range_.base(), writable_end_);
}

Result<std::size_t> PageHeap::allocate(std::size_t bytes, std::size_t alignment,
                                       std::size_t commit_bytes,
                                       OnRefusal on_refusal) {
  bool small_pages = on_refusal == OnRefusal::kCompact;
  std::optional<Place> place = find({.bytes = bytes,
                                     .alignment = alignment,
                                     .commit_bytes = commit_bytes,
                                     .small_pages = small_pages});
  if (!place) {
    return Status::error(Code::kOverBudget,
                         strf("arena of %s: no free range for %s (%s is used)",
                              format_bytes(reserved_bytes()).c_str(),
                              format_bytes(bytes).c_str(),
                              format_bytes(stats_.used_bytes).c_str()));
  }
  stats_.used_bytes += bytes;
  if (Status status = commit(*place, on_refusal); !status.ok()) {
    stats_.used_bytes -= bytes;
    return status;
  }
  stats_.used_high_bytes = std::max(stats_.used_high_bytes, stats_.used_bytes);
  remove_range(place->range_begin, place->range_bytes);
  add_range({place->range_begin, place->extent.begin});
  add_range({place->extent.end, place->range_begin + place->range_bytes});
  unpoison(base() + place->extent.begin, bytes);
  return place->extent.begin;
}

void PageHeap::free(std::size_t offset, std::size_t bytes) {
  poison(base() + offset, bytes);
  stats_.used_bytes -= bytes;
  Extent merged{offset, offset + bytes};
  auto after = by_begin_.lower_bound(offset);
  if (after != by_begin_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      merged.begin = before->first;
      remove_range(before->first, before->second);
    }
  }
  if (after != by_begin_.end() && after->first == merged.end) {
    merged.end += after->second;
    remove_range(after->first, after->second);
  }
  add_range(merged);
}

Status PageHeap::commit_inside(Extent extent, OnRefusal on_refusal) {
  std::size_t fresh = committed_.clear_small_bytes_in(extent);
  Place place{.extent = extent, .commit = extent, .fresh_bytes = fresh};
  if (fresh == 0) return {};
  ZINF_TRY(reserve(place, on_refusal));
  if (Status status = commit_small(extent); !status.ok()) {
    if (reservation_) reservation_->shrink(fresh);
    return status;
  }
  note_committed(fresh);
  return {};
}

std::size_t PageHeap::discard_inside(Extent extent) {
  std::size_t discarded = discard_small(extent);
  note_purged(discarded);
  return discarded;
}

// The place with the fewest fresh pages, and of those the smallest range.
std::optional<PageHeap::Place> PageHeap::find(const Request& request) const {
  std::optional<Place> best;
  int looked_at = 0;
  for (auto it = by_size_.lower_bound({request.bytes, 0}); it != by_size_.end();
       ++it) {
    auto [range_bytes, begin] = *it;
    Place place = place_in({begin, begin + range_bytes}, request);
    if (place.extent.empty()) continue;
    if (!best || place.fresh_bytes < best->fresh_bytes) best = place;
    if (best->fresh_bytes == 0 || ++looked_at == kMaxCandidates) break;
  }
  return best;
}

// At the beginning of a free range or at its end, whichever needs fewer fresh
// pages; an empty extent when the alignment leaves no room.
PageHeap::Place PageHeap::place_in(Extent range, const Request& request) const {
  std::size_t low = align_up(range.begin, request.alignment);
  if (low + request.bytes > range.end) return {};
  std::size_t high = align_down(range.end - request.bytes, request.alignment);
  Place place = place_at(low, request);
  if (place.fresh_bytes != 0 && high != low) {
    Place at_end = place_at(high, request);
    if (at_end.fresh_bytes < place.fresh_bytes) place = at_end;
  }
  place.range_begin = range.begin;
  place.range_bytes = range.bytes();
  return place;
}

PageHeap::Place PageHeap::place_at(std::size_t begin,
                                   const Request& request) const {
  Place place{.extent = {begin, begin + request.bytes}};
  if (request.small_pages) {
    place.commit = {begin, begin + request.commit_bytes};
    place.fresh_bytes = committed_.clear_small_bytes_in(place.commit);
  } else {
    place.commit = place.extent.outer_pages();
    place.fresh_bytes = committed_.clear_bytes_in(place.commit);
  }
  return place;
}

Status PageHeap::commit(const Place& place, OnRefusal on_refusal) {
  if (place.fresh_bytes == 0) return {};
  ZINF_TRY(make_writable(place.extent.outer_pages().end));
  std::size_t limit =
      soft_limit(std::max(stats_.used_bytes, stats_.used_high_bytes));
  std::size_t after = committed_.set_bytes() + place.fresh_bytes;
  if (after > limit) purge(after - limit, place.extent.outer_pages());
  ZINF_TRY(reserve(place, on_refusal));
  if (on_refusal == OnRefusal::kCompact) {
    if (Status status = commit_small(place.commit); !status.ok()) {
      if (reservation_) reservation_->shrink(place.fresh_bytes);
      return status;
    }
  } else {
    advise_huge(place.commit);
    committed_.set(place.commit);
  }
  note_committed(place.fresh_bytes);
  return {};
}

// Huge pages that the extent covers are committed as wholes.
Status PageHeap::commit_small(Extent extent) {
  Extent outer = extent.outer_pages();
  Extent inner = extent.inner_pages();
  Extent head{outer.begin, outer.begin + kHugePage};
  Extent tail{outer.end - kHugePage, outer.end};
  bool ready = (head.begin == extent.begin && head.end <= extent.end) ||
               advise_small(head);
  ready = ready && ((tail.end == extent.end && tail.begin >= extent.begin) ||
                    advise_small(tail));
  if (!ready) {
    return Status::error(Code::kOverBudget,
                         "arena: the system keeps no more ranges of addresses "
                         "apart (vm.max_map_count)");
  }
  advise_huge(inner);
  committed_.set_small(extent);
  return {};
}

// A page that is split has the advice already, and one that is committed as a
// whole keeps what it has.
bool PageHeap::advise_small(Extent huge_page) {
  return committed_.is_touched(huge_page.begin) || split(huge_page);
}

bool PageHeap::split(Extent huge_page) {
  if (all_small_ || committed_.has_split_in(huge_page)) return true;
  if (committed_.num_split() < kMaxSplit) {
    return range_.advise_small(huge_page.begin, huge_page.bytes());
  }
  all_small_ = range_.advise_small(0, writable_end_);
  return all_small_;
}

// For what is about to be committed or given back as a whole.
void PageHeap::advise_huge(Extent pages) {
  if (all_small_ || pages.empty() || !committed_.has_split_in(pages)) return;
  range_.advise_huge(pages.begin, pages.bytes());
}

Status PageHeap::reserve(const Place& place, OnRefusal on_refusal) {
  if (!reservation_) return {};
  Status status = reservation_->grow(place.fresh_bytes);
  // The limit may have become smaller than what is held: then it takes more.
  for (std::size_t bytes = place.fresh_bytes; !status.ok(); bytes *= 2) {
    std::size_t purged = on_refusal == OnRefusal::kCompact
                             ? purge_small(bytes, place.extent)
                             : purge(bytes, place.extent.outer_pages());
    if (purged == 0) break;
    status = reservation_->grow(place.fresh_bytes);
  }
  if (!status.ok() && on_refusal == OnRefusal::kExceed) {
    reservation_->grow_beyond_limit(place.fresh_bytes);
    return {};
  }
  return status;
}

void PageHeap::note_committed(std::size_t fresh_bytes) {
  stats_.fresh_bytes += fresh_bytes;
  note_changed();
  stats_.committed_high_bytes =
      std::max(stats_.committed_high_bytes, stats_.committed_bytes);
}

void PageHeap::note_purged(std::size_t bytes) {
  stats_.purged_bytes += bytes;
  note_changed();
  if (reservation_) reservation_->shrink(bytes);
}

void PageHeap::note_changed() {
  stats_.committed_bytes = committed_.set_bytes();
  if (!all_small_ || committed_.num_split() > 0) return;
  range_.advise_huge(0, writable_end_);
  all_small_ = false;
}

Status PageHeap::make_writable(std::size_t end) {
  if (end <= writable_end_) return {};
  std::size_t new_end =
      std::min(align_up(end, kWritableStep), reserved_bytes());
  std::size_t bytes = new_end - writable_end_;
  if (Status status = range_.make_writable(writable_end_, bytes);
      !status.ok()) {
    return Status::error(
        Code::kOverBudget,
        "arena: the system gives no more memory: " + status.text());
  }
  if (!all_small_ || !range_.advise_small(writable_end_, bytes)) {
    range_.advise_huge(writable_end_, bytes);
  }
  writable_end_ = new_end;
  return {};
}

// From the smallest ranges first: they are the least likely to hold the next
// block.
std::size_t PageHeap::purge(std::size_t bytes, Extent keep) {
  std::size_t purged = 0;
  for (auto [range_bytes, begin] : by_size_) {
    if (purged >= bytes) break;
    Extent pages = Extent{begin, begin + range_bytes}.inner_pages();
    if (pages.empty()) continue;
    Extent before{pages.begin, std::clamp(keep.begin, pages.begin, pages.end)};
    Extent behind{std::clamp(keep.end, pages.begin, pages.end), pages.end};
    if (keep.empty()) before = {};
    if (keep.empty()) behind = pages;
    purged += purge_inside(behind, bytes - purged);
    if (purged < bytes) purged += purge_inside(before, bytes - purged);
  }
  note_purged(purged);
  return purged;
}

std::size_t PageHeap::purge_inside(Extent pages, std::size_t bytes) {
  std::size_t purged = 0;
  pages.end = std::min(pages.end, writable_end_);
  while (purged < bytes && !pages.empty()) {
    Extent run = committed_.last_set_run(pages);
    if (run.empty()) break;
    std::size_t wanted = align_up(bytes - purged, kHugePage);
    run.begin = std::max(run.begin, run.end - std::min(run.end, wanted));
    range_.discard(run.begin, run.bytes());
    advise_huge(run);
    purged += run.bytes() - committed_.clear_bytes_in(run);
    committed_.clear(run);
    pages.end = run.begin;
  }
  return purged;
}

// From the largest ranges first: the fewest huge pages are split.
std::size_t PageHeap::purge_small(std::size_t bytes, Extent keep) {
  std::size_t whole = purge(bytes, keep.outer_pages());
  std::size_t purged = 0;
  auto purge_part = [&](Extent part) {
    // What is to be kept lies in the middle, or covers it.
    Extent before{part.begin, std::clamp(keep.begin, part.begin, part.end)};
    Extent behind{std::clamp(keep.end, part.begin, part.end), part.end};
    if (keep.empty()) before = {};
    if (keep.empty()) behind = part;
    purged += discard_small(before);
    purged += discard_small(behind);
  };
  for (auto it = by_size_.rbegin(); it != by_size_.rend(); ++it) {
    if (whole + purged >= bytes) break;
    auto [range_bytes, begin] = *it;
    std::size_t end = std::min(begin + range_bytes, writable_end_);
    if (begin >= end) continue;
    std::size_t head_end = std::min(end, align_up(begin, kHugePage));
    std::size_t tail_begin = std::max(head_end, align_down(end, kHugePage));
    purge_part({begin, head_end});
    purge_part({tail_begin, end});
    // What stands before and behind the kept extent in its own huge pages.
    if (!keep.empty() && keep.begin >= begin && keep.end <= end) {
      Extent outer = keep.outer_pages();
      purged += discard_small({std::max(begin, outer.begin), keep.begin});
      purged += discard_small({keep.end, std::min(end, outer.end)});
    }
  }
  note_purged(purged);
  return whole + purged;
}

// REQUIRES: an extent inside one huge page, or an empty one.
std::size_t PageHeap::discard_small(Extent extent) {
  if (extent.empty()) return 0;
  Extent page = Extent{extent.begin, extent.begin + 1}.outer_pages();
  if (committed_.clear_small_bytes_in(extent) == extent.bytes()) return 0;
  if (!split(page)) return 0;
  range_.discard_part(extent.begin, extent.bytes());
  std::size_t discarded = committed_.clear_small(extent);
  if (!all_small_ && !committed_.is_touched(page.begin)) {
    range_.advise_huge(page.begin, page.bytes());
  }
  return discarded;
}

void PageHeap::add_range(Extent range) {
  if (range.empty()) return;
  by_begin_.emplace(range.begin, range.bytes());
  by_size_.emplace(range.bytes(), range.begin);
}

void PageHeap::remove_range(std::size_t begin, std::size_t bytes) {
  by_begin_.erase(begin);
  by_size_.erase({bytes, begin});
}

}  // namespace zinf
