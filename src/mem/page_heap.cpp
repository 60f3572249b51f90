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
                                       OnRefusal on_refusal) {
  std::optional<Place> place = find(bytes, alignment);
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

// The place with the fewest fresh pages, and of those the smallest range.
std::optional<PageHeap::Place> PageHeap::find(std::size_t bytes,
                                              std::size_t alignment) const {
  std::optional<Place> best;
  int looked_at = 0;
  for (auto it = by_size_.lower_bound({bytes, 0}); it != by_size_.end(); ++it) {
    auto [range_bytes, begin] = *it;
    Place place = place_in({begin, begin + range_bytes}, bytes, alignment);
    if (place.extent.empty()) continue;
    if (!best || place.fresh_bytes < best->fresh_bytes) best = place;
    if (best->fresh_bytes == 0 || ++looked_at == kMaxCandidates) break;
  }
  return best;
}

// At the beginning of a free range or at its end, whichever needs fewer fresh
// pages; an empty extent when the alignment leaves no room.
PageHeap::Place PageHeap::place_in(Extent range, std::size_t bytes,
                                   std::size_t alignment) const {
  Place place{.range_begin = range.begin, .range_bytes = range.bytes()};
  std::size_t low = align_up(range.begin, alignment);
  if (low + bytes > range.end) return place;
  std::size_t high = align_down(range.end - bytes, alignment);
  place.extent = {low, low + bytes};
  place.fresh_bytes = committed_.clear_bytes_in(place.extent.outer_pages());
  if (place.fresh_bytes == 0 || high == low) return place;
  Extent at_end{high, high + bytes};
  std::size_t fresh = committed_.clear_bytes_in(at_end.outer_pages());
  if (fresh < place.fresh_bytes) {
    place.extent = at_end;
    place.fresh_bytes = fresh;
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
  committed_.set(place.extent.outer_pages());
  stats_.fresh_bytes += place.fresh_bytes;
  stats_.committed_bytes = committed_.set_bytes();
  stats_.committed_high_bytes =
      std::max(stats_.committed_high_bytes, stats_.committed_bytes);
  return {};
}

Status PageHeap::reserve(const Place& place, OnRefusal on_refusal) {
  if (!reservation_) return {};
  Status status = reservation_->grow(place.fresh_bytes);
  if (status.ok()) return status;
  if (purge(place.fresh_bytes, place.extent.outer_pages()) > 0) {
    status = reservation_->grow(place.fresh_bytes);
  }
  if (!status.ok() && on_refusal == OnRefusal::kExceed) {
    reservation_->grow_beyond_limit(place.fresh_bytes);
    return {};
  }
  return status;
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
  range_.advise_huge(writable_end_, bytes);
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
  stats_.purged_bytes += purged;
  stats_.committed_bytes = committed_.set_bytes();
  if (reservation_) reservation_->shrink(purged);
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
    committed_.clear(run);
    purged += run.bytes();
    pages.end = run.begin;
  }
  return purged;
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
