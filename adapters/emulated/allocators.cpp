#include "adapters/emulated/allocators.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "adapters/emulated/device.h"
#include "src/base/align.h"
#include "src/base/strf.h"

namespace zinf::emulated {
namespace {

constexpr std::size_t kPinnedAlignment = 64;

void free_block(void* block) { device_allocator().free(block); }
void free_pinned(void* block) { pinned().free(block); }

}  // namespace

c10::DataPtr DeviceAllocator::allocate(std::size_t bytes) {
  if (bytes == 0) return {nullptr, kDevice};
  void* block = memory_.allocate(bytes);
  if (block == nullptr) {
    streams_.wait_all();  // for what was freed and is still in use
    block = memory_.allocate(bytes);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, refusal(bytes));
  MutexLock lock(mutex_);
  owners_[block] = {&streams_.current_stream(), {}};
  return {block, block, &free_block, kDevice};
}

void DeviceAllocator::free(void* block) {
  if (!memory_.belongs_here()) return;
  Owner owner;
  {
    MutexLock lock(mutex_);
    auto known = owners_.extract(block);
    if (!known.empty()) owner = std::move(known.mapped());
  }
  memory_.release(block);
  for (Stream* other : owner.others) hold(*owner.stream, mark(*other));
  owner.stream->enqueue("", [this, block] { memory_.reclaim(block); });
}

c10::DeleterFnPtr DeviceAllocator::raw_deleter() const { return &free_block; }

void DeviceAllocator::copy_data(void* to, const void* from,
                                std::size_t bytes) const {
  mark(streams_.current_stream()).wait();
  std::memcpy(memory_.kernel_address(to), memory_.kernel_address(from), bytes);
}

void DeviceAllocator::recordStream(const c10::DataPtr& data,
                                   c10::Stream stream) {
  if (data.get_deleter() != &free_block) return;  // somebody else's
  Stream* user = &streams_.get(static_cast<Streams::Id>(stream.id()));
  MutexLock lock(mutex_);
  auto known = owners_.find(data.get());
  if (known == owners_.end() || known->second.stream == user) return;
  auto& others = known->second.others;
  if (std::ranges::find(others, user) == others.end()) others.push_back(user);
}

c10::CachingDeviceAllocator::DeviceStats DeviceAllocator::getDeviceStats(
    c10::DeviceIndex) {
  DeviceMemory::Use use = memory_.use();
  c10::CachingAllocator::Stat bytes;
  bytes.current = static_cast<std::int64_t>(use.used_bytes);
  bytes.peak = static_cast<std::int64_t>(use.peak_bytes);
  c10::CachingDeviceAllocator::DeviceStats stats;
  stats.allocated_bytes[0] = bytes;  // over all kinds of blocks
  stats.reserved_bytes[0] = bytes;
  stats.active_bytes[0] = bytes;
  return stats;
}

std::pair<std::size_t, std::size_t> DeviceAllocator::getMemoryInfo(
    c10::DeviceIndex) {
  DeviceMemory::Use use = memory_.use();
  return {use.total_bytes - use.used_bytes, use.total_bytes};
}

std::string DeviceAllocator::refusal(std::size_t bytes) const {
  DeviceMemory::Use use = memory_.use();
  return strf(
      "emu: out of memory: %zu bytes are needed, %zu of %zu are free, "
      "the largest block has %zu",
      bytes, use.total_bytes - use.used_bytes, use.total_bytes,
      use.largest_free_bytes);
}

c10::DataPtr PinnedAllocator::allocate(std::size_t bytes) {
  if (bytes == 0) return {nullptr, c10::kCPU};
  // Not torch's allocator of the CPU: no real device's pinned memory is either.
  void* block =
      std::aligned_alloc(kPinnedAlignment, align_up(bytes, kPinnedAlignment));
  TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "emu: ", bytes,
                   " bytes of pinned memory are not to be had");
  MutexLock lock(mutex_);
  blocks_[static_cast<const std::byte*>(block)] = {bytes, {}};
  use_.used_bytes += bytes;
  use_.peak_bytes = std::max(use_.peak_bytes, use_.used_bytes);
  return {block, block, &free_pinned, c10::kCPU};
}

void PinnedAllocator::free(void* block) {
  if (!memory().belongs_here()) return;
  Pinned freed;
  {
    MutexLock lock(mutex_);
    auto known = blocks_.extract(static_cast<const std::byte*>(block));
    freed = std::move(known.mapped());
    use_.used_bytes -= freed.bytes;
  }
  auto give_back = [block, bytes = freed.bytes] {
    std::memset(block, kPoison, bytes);
    std::free(block);
  };
  std::erase_if(freed.uses,
                [](const auto& use) { return use.first->done(use.second); });
  if (freed.uses.empty()) return give_back();
  auto last = freed.uses.extract(freed.uses.begin());
  for (auto [stream, ticket] : freed.uses) hold(*last.key(), {stream, ticket});
  last.key()->enqueue("", give_back);
}

c10::DeleterFnPtr PinnedAllocator::raw_deleter() const { return &free_pinned; }

void PinnedAllocator::copy_data(void* to, const void* from,
                                std::size_t bytes) const {
  std::memcpy(to, from, bytes);
}

PinnedAllocator::Blocks::iterator PinnedAllocator::find(const void* address) {
  const auto* byte = static_cast<const std::byte*>(address);
  auto after = blocks_.upper_bound(byte);
  if (after == blocks_.begin()) return blocks_.end();
  --after;
  return byte < after->first + after->second.bytes ? after : blocks_.end();
}

bool PinnedAllocator::contains(const void* address) const {
  MutexLock lock(mutex_);
  auto* self = const_cast<PinnedAllocator*>(this);
  return self->find(address) != self->blocks_.end();
}

bool PinnedAllocator::record(const void* address, const Mark& until) {
  MutexLock lock(mutex_);
  auto block = find(address);
  if (block == blocks_.end()) return false;
  Stream::Ticket& last = block->second.uses[until.stream];
  last = std::max(last, until.ticket);
  return true;
}

bool PinnedAllocator::record_event(void* block, void*, c10::Stream stream) {
  return record(block,
                mark(streams().get(static_cast<Streams::Id>(stream.id()))));
}

void PinnedAllocator::reset_peak_stats() {
  MutexLock lock(mutex_);
  use_.peak_bytes = use_.used_bytes;
}

PinnedAllocator::Use PinnedAllocator::use() const {
  MutexLock lock(mutex_);
  return use_;
}

}  // namespace zinf::emulated
