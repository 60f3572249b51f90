#include "src/tier/extents.h"

#include <algorithm>
#include <iterator>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"

namespace zinf::tier {

void FreeList::add(std::uint64_t begin, std::uint64_t end) {
  if (begin >= end) return;
  all_.emplace(begin, end - begin);
  bytes_ += end - begin;
  give(begin, end - begin);
}

bool FreeList::contains(std::uint64_t offset) const {
  auto range = all_.upper_bound(offset);
  if (range == all_.begin()) return false;
  --range;
  return offset - range->first < range->second;
}

void FreeList::insert(std::uint64_t offset, std::uint64_t bytes) {
  by_offset_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
  free_bytes_ += bytes;
}

void FreeList::erase(Ranges::iterator range) {
  by_size_.erase({range->second, range->first});
  free_bytes_ -= range->second;
  by_offset_.erase(range);
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> FreeList::take(
    std::uint64_t bytes) {
  ZINF_CHECK(bytes <= free_bytes_ && bytes % kUnit == 0,
             "%llu bytes of %llu free", static_cast<unsigned long long>(bytes),
             static_cast<unsigned long long>(free_bytes_));
  std::vector<std::pair<std::uint64_t, std::uint64_t>> taken;
  while (bytes > 0) {
    auto fit = by_size_.lower_bound({bytes, 0});
    if (fit == by_size_.end()) --fit;
    auto [size, offset] = *fit;
    std::uint64_t part = std::min(size, bytes);
    erase(by_offset_.find(offset));
    if (size > part) insert(offset + part, size - part);
    taken.emplace_back(offset, part);
    bytes -= part;
  }
  return taken;
}

bool FreeList::take_at(std::uint64_t offset, std::uint64_t bytes) {
  auto range = by_offset_.upper_bound(offset);
  if (range == by_offset_.begin()) return false;
  --range;
  auto [begin, size] = *range;
  if (offset - begin > size || size - (offset - begin) < bytes) return false;
  erase(range);
  if (offset > begin) insert(begin, offset - begin);
  std::uint64_t rest = begin + size - (offset + bytes);
  if (rest > 0) insert(offset + bytes, rest);
  return true;
}

void FreeList::give(std::uint64_t offset, std::uint64_t bytes) {
  auto next = by_offset_.lower_bound(offset);
  ZINF_CHECK(next == by_offset_.end() || offset + bytes <= next->first,
             "freed twice at %llu", static_cast<unsigned long long>(offset));
  if (next != by_offset_.begin()) {
    auto before = std::prev(next);
    ZINF_CHECK(before->first + before->second <= offset, "freed twice at %llu",
               static_cast<unsigned long long>(offset));
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      erase(before);
    }
  }
  if (next != by_offset_.end() && offset + bytes == next->first) {
    bytes += next->second;
    erase(next);
  }
  insert(offset, bytes);
}

Allocator::Allocator(std::uint64_t block_bytes, const Capacity& capacity)
    : block_bytes_(block_bytes) {
  {
    MutexLock lock(mutex_);
    volumes_.resize(capacity.volume_bytes.size());
  }
  grow(capacity);
}

void Allocator::grow(const Capacity& capacity) {
  MutexLock lock(mutex_);
  std::uint64_t begin = volumes_[0].end;
  for (const Piece& region : capacity.metadata) {
    if (region.offset < begin) continue;  // known
    volumes_[0].data.add(begin, region.offset);
    metadata_.add(region.offset, region.end());
    begin = region.end();
  }
  volumes_[0].end = begin;
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    Volume& volume = volumes_[i];
    volume.data.add(volume.end, capacity.volume_bytes[i]);
    volume.end = std::max(volume.end, capacity.volume_bytes[i]);
  }
}

void Allocator::set_weights(std::span<const double> weights) {
  MutexLock lock(mutex_);
  double total = 0;
  for (double weight : weights) total += weight;
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    volumes_[i].weight = weights[i] / total;
  }
}

// The volume of every block. Each block earns every volume its share; the one
// that is owed most takes it. Full volumes are passed over.
std::vector<std::uint32_t> Allocator::deal(std::uint64_t bytes) {
  std::vector<std::uint64_t> left;
  left.reserve(volumes_.size());
  for (const Volume& volume : volumes_)
    left.push_back(volume.data.free_bytes());
  std::vector<std::uint32_t> dealt;
  for (std::uint64_t done = 0; done < bytes; done += block_bytes_) {
    std::uint64_t block = std::min(block_bytes_, bytes - done);
    std::size_t best = volumes_.size();
    for (std::size_t i = 0; i < volumes_.size(); ++i) {
      volumes_[i].credit += volumes_[i].weight * static_cast<double>(block);
      if (left[i] < block) continue;
      if (best == volumes_.size() ||
          volumes_[i].credit > volumes_[best].credit) {
        best = i;
      }
    }
    if (best == volumes_.size()) return {};
    left[best] -= block;
    volumes_[best].credit -= static_cast<double>(block);
    dealt.push_back(static_cast<std::uint32_t>(best));
  }
  // A volume that was full for long must not claim everything afterwards.
  double most = 64 * static_cast<double>(block_bytes_);
  for (Volume& volume : volumes_) {
    volume.credit = std::clamp(volume.credit, -most, most);
  }
  return dealt;
}

Result<std::vector<Piece>> Allocator::take(std::uint64_t bytes) {
  bytes = align_up(bytes, std::uint64_t{kUnit});
  MutexLock lock(mutex_);
  if (bytes > free_locked()) {
    return Status::error(
        Code::kNoSpace,
        strf("%s are needed and %s are free in the store",
             format_bytes(bytes).c_str(), format_bytes(free_locked()).c_str()));
  }
  std::vector<std::uint32_t> dealt = deal(bytes);
  std::vector<std::uint64_t> share(volumes_.size());
  for (std::size_t i = 0; i < dealt.size(); ++i) {
    std::uint64_t done = i * block_bytes_;
    share[dealt[i]] += std::min(block_bytes_, bytes - done);
  }
  std::vector<Piece> pieces;
  if (dealt.empty()) {
    // No volume has room for a whole block any more: take what there is.
    for (std::uint32_t v = 0; v < volumes_.size() && bytes > 0; ++v) {
      std::uint64_t part = std::min(bytes, volumes_[v].data.free_bytes());
      for (auto [offset, size] : volumes_[v].data.take(part)) {
        pieces.push_back({v, offset, size});
      }
      bytes -= part;
    }
    return pieces;
  }
  using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;
  std::vector<Ranges> ranges;
  ranges.reserve(volumes_.size());
  std::vector<std::size_t> at(volumes_.size());
  for (std::size_t v = 0; v < volumes_.size(); ++v) {
    ranges.push_back(volumes_[v].data.take(share[v]));
  }
  for (std::size_t i = 0; i < dealt.size(); ++i) {
    std::uint32_t v = dealt[i];
    std::uint64_t block = std::min(block_bytes_, bytes - i * block_bytes_);
    while (block > 0) {
      auto& [offset, size] = ranges[v][at[v]];
      std::uint64_t part = std::min(block, size);
      bool follows = !pieces.empty() && pieces.back().volume == v &&
                     pieces.back().end() == offset;
      if (follows) {
        pieces.back().bytes += part;
      } else {
        pieces.push_back({v, offset, part});
      }
      offset += part;
      size -= part;
      block -= part;
      if (size == 0) ++at[v];
    }
  }
  return pieces;
}

Result<std::vector<Piece>> Allocator::take_metadata(std::uint64_t bytes) {
  bytes = align_up(bytes, std::uint64_t{kUnit});
  MutexLock lock(mutex_);
  FreeList& region =
      metadata_.free_bytes() >= bytes ? metadata_ : volumes_[0].data;
  if (region.free_bytes() < bytes) {
    return Status::error(
        Code::kNoSpace, strf("a table or catalog of %s has no room in volume 0",
                             format_bytes(bytes).c_str()));
  }
  std::vector<Piece> pieces;
  for (auto [offset, size] : region.take(bytes)) {
    pieces.push_back({0, offset, size});
  }
  return pieces;
}

FreeList* Allocator::region_of(const Piece& piece) {
  if (piece.volume == 0 && metadata_.contains(piece.offset)) return &metadata_;
  return &volumes_[piece.volume].data;
}

Status Allocator::take_at(const std::vector<Piece>& pieces) {
  MutexLock lock(mutex_);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (region_of(piece)->take_at(piece.offset, piece.bytes)) continue;
    while (i-- > 0)
      region_of(pieces[i])->give(pieces[i].offset, pieces[i].bytes);
    return Status::error(
        Code::kCorrupt,
        strf("the %llu bytes at %llu of volume %u are claimed twice",
             static_cast<unsigned long long>(piece.bytes),
             static_cast<unsigned long long>(piece.offset), piece.volume));
  }
  return {};
}

void Allocator::give(const std::vector<Piece>& pieces) {
  MutexLock lock(mutex_);
  for (const Piece& piece : pieces) {
    region_of(piece)->give(piece.offset, piece.bytes);
  }
}

std::uint64_t Allocator::free_locked() const {
  std::uint64_t bytes = 0;
  for (const Volume& volume : volumes_) bytes += volume.data.free_bytes();
  return bytes;
}

std::uint64_t Allocator::free_bytes() const {
  MutexLock lock(mutex_);
  return free_locked();
}

std::uint64_t Allocator::capacity_bytes() const {
  MutexLock lock(mutex_);
  std::uint64_t bytes = 0;
  for (const Volume& volume : volumes_) bytes += volume.data.bytes();
  return bytes;
}

std::size_t Allocator::num_free_extents() const {
  MutexLock lock(mutex_);
  std::size_t count = 0;
  for (const Volume& volume : volumes_) count += volume.data.num_ranges();
  return count;
}

}  // namespace zinf::tier
