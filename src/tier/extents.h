// Which parts of the volumes are free, and who holds the others.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "src/base/mutex.h"
#include "src/tier/format.h"
#include "zinf/status.h"

namespace zinf::tier {

// The free ranges of some room. One thread.
//
// Best fit: the smallest range that holds all of a request; when none does, the
// largest ones one after the other. So a request succeeds whenever its bytes
// are free, in as few pieces as there can be.
class FreeList {
 public:
  FreeList() = default;
  FreeList(std::uint64_t begin, std::uint64_t end) { add(begin, end); }

  // Makes [begin, end) part of it, free. It must not be already.
  void add(std::uint64_t begin, std::uint64_t end);

  // Pieces of exactly `bytes`, a multiple of kUnit and at most free_bytes().
  std::vector<std::pair<std::uint64_t, std::uint64_t>> take(
      std::uint64_t bytes);
  // False when some of the range is not free: then nothing is taken.
  bool take_at(std::uint64_t offset, std::uint64_t bytes);
  void give(std::uint64_t offset, std::uint64_t bytes);

  bool contains(std::uint64_t offset) const;
  std::uint64_t free_bytes() const { return free_bytes_; }
  std::uint64_t bytes() const { return bytes_; }
  std::size_t num_ranges() const { return by_offset_.size(); }

 private:
  using Ranges = std::map<std::uint64_t, std::uint64_t>;  // offset -> bytes
  void insert(std::uint64_t offset, std::uint64_t bytes);
  void erase(Ranges::iterator range);

  Ranges all_;  // what add() was called with
  std::uint64_t bytes_ = 0;
  std::uint64_t free_bytes_ = 0;
  Ranges by_offset_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;
};

// All volumes. Thread-safe.
class Allocator {
 public:
  // The capacity's metadata regions are for tables and catalogs alone, so that
  // data cannot crowd them out.
  Allocator(std::uint64_t block_bytes, const Capacity& capacity);

  // Adds what `capacity` has beyond the present one.
  void grow(const Capacity& capacity);

  // Shares of the traffic; any positive unit.
  void set_weights(std::span<const double> weights);

  // Pieces for `bytes` of a state, in the order of its bytes; the block is the
  // unit that is dealt out to the volumes. kNoSpace when less is free.
  Result<std::vector<Piece>> take(std::uint64_t bytes);
  // For a table or catalog: in volume 0, from its own regions first.
  Result<std::vector<Piece>> take_metadata(std::uint64_t bytes);
  // What was found on the disk; kCorrupt when it overlaps what is taken.
  Status take_at(const std::vector<Piece>& pieces);
  void give(const std::vector<Piece>& pieces);

  std::uint64_t capacity_bytes() const;  // without the metadata's regions
  std::uint64_t free_bytes() const;
  std::size_t num_free_extents() const;

 private:
  struct Volume {
    FreeList data;
    std::uint64_t end = kDataBegin;
    double weight = 1;
    double credit = 0;  // bytes that it should have got and did not
  };

  std::vector<std::uint32_t> deal(std::uint64_t bytes) ZINF_REQUIRES(mutex_);
  FreeList* region_of(const Piece& piece) ZINF_REQUIRES(mutex_);
  std::uint64_t free_locked() const ZINF_REQUIRES(mutex_);

  const std::uint64_t block_bytes_;
  mutable Mutex mutex_;
  std::vector<Volume> volumes_ ZINF_GUARDED_BY(mutex_);
  FreeList metadata_ ZINF_GUARDED_BY(mutex_);
};

// Taken space; gives it back when the last holder is gone. `num_tables` counts
// the tables that refer to it, which decides between overwriting and copying.
class Placement {
 public:
  Placement(std::shared_ptr<Allocator> allocator, std::vector<Piece> pieces)
      : pieces(std::move(pieces)), allocator_(std::move(allocator)) {}
  ~Placement() { allocator_->give(pieces); }
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  const std::vector<Piece> pieces;
  mutable std::atomic<int> num_tables = 0;
  // This process wrote it or has compared its checksums.
  mutable std::atomic<bool> trusted = false;

 private:
  std::shared_ptr<Allocator> allocator_;
};

// A table's hold on a placement.
class PlacementRef {
 public:
  PlacementRef() = default;
  explicit PlacementRef(std::shared_ptr<const Placement> placement)
      : placement_(std::move(placement)) {
    add(1);
  }
  PlacementRef(const PlacementRef& other) : placement_(other.placement_) {
    add(1);
  }
  PlacementRef(PlacementRef&& other) noexcept = default;
  PlacementRef& operator=(PlacementRef other) noexcept {
    std::swap(placement_, other.placement_);
    return *this;
  }
  ~PlacementRef() { add(-1); }

  const std::shared_ptr<const Placement>& get() const { return placement_; }

 private:
  void add(int count) {
    if (placement_ != nullptr) placement_->num_tables += count;
  }
  std::shared_ptr<const Placement> placement_;
};

}  // namespace zinf::tier
