#include "adapters/emulated/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "src/base/align.h"
#include "src/base/check.h"

namespace zinf::emulated {
namespace {

constexpr std::size_t kAlignment = 64;

Result<std::byte*> map(int file, std::size_t bytes, int protection) {
  void* address = mmap(nullptr, bytes, protection, MAP_SHARED, file, 0);
  if (address == MAP_FAILED) {
    return Status::system("map", "the emulated device's memory", errno);
  }
  // A forked child would write into its parent's tensors.
  madvise(address, bytes, MADV_DONTFORK);
  return static_cast<std::byte*>(address);
}

}  // namespace

Result<std::unique_ptr<DeviceMemory>> DeviceMemory::create(std::size_t bytes) {
  if (bytes == 0) {
    return Status::error(Code::kInvalid,
                         "the emulated device needs more than 0 bytes");
  }
  bytes = align_up(bytes, kPage);
  int file = memfd_create("zinf-emulated", MFD_CLOEXEC);
  if (file < 0) return Status::system("create", "a memory file", errno);
  Status sized = ftruncate(file, static_cast<off_t>(bytes)) == 0
                     ? Status()
                     : Status::system("size", "a memory file", errno);
  auto shown = map(file, bytes, PROT_NONE);
  auto hidden = map(file, bytes, PROT_READ | PROT_WRITE);
  close(file);  // the mappings keep it
  ZINF_TRY(sized);
  ZINF_TRY(shown.status());
  ZINF_TRY(hidden.status());
  return std::unique_ptr<DeviceMemory>(
      new DeviceMemory(*shown, *hidden, bytes));
}

DeviceMemory::DeviceMemory(std::byte* shown, std::byte* hidden,
                           std::size_t bytes)
    : shown_(shown), hidden_(hidden), total_bytes_(bytes), owner_(getpid()) {
  free_.emplace(0, bytes);
}

DeviceMemory::~DeviceMemory() {
  munmap(shown_, total_bytes_);
  munmap(hidden_, total_bytes_);
}

void* DeviceMemory::allocate(std::size_t bytes) {
  if (bytes > total_bytes_) return nullptr;
  bytes = align_up(std::max(bytes, std::size_t{1}), kAlignment);
  MutexLock lock(mutex_);
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->second < bytes) continue;
    if (best == free_.end() || block->second < best->second) best = block;
  }
  if (best == free_.end()) return nullptr;
  auto [offset, room] = *best;
  free_.erase(best);
  if (room > bytes) free_.emplace(offset + bytes, room - bytes);
  used_.emplace(offset, bytes);
  used_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  return shown_ + offset;
}

void DeviceMemory::release(void* block) {
  MutexLock lock(mutex_);
  auto used = used_.extract(offset_of(block));
  ZINF_CHECK(!used.empty(), "%p is not a block of the device", block);
  used_bytes_ -= used.mapped();
  released_.insert(std::move(used));
}

void DeviceMemory::reclaim(void* block) {
  MutexLock lock(mutex_);
  auto released = released_.extract(offset_of(block));
  ZINF_CHECK(!released.empty(), "%p was not released", block);
  std::size_t offset = released.key();
  std::size_t bytes = released.mapped();
  std::memset(hidden_ + offset, kPoison, bytes);

  auto next = free_.upper_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

bool DeviceMemory::belongs_here() const { return getpid() == owner_; }

std::size_t DeviceMemory::offset_of(const void* block) const {
  return static_cast<std::size_t>(static_cast<const std::byte*>(block) -
                                  shown_);
}

void* DeviceMemory::kernel_address(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  if (byte < shown_ || byte >= shown_ + total_bytes_) return nullptr;
  return hidden_ + (byte - shown_);
}

DeviceMemory::Use DeviceMemory::use() const {
  MutexLock lock(mutex_);
  std::size_t largest = 0;
  for (auto [offset, bytes] : free_) largest = std::max(largest, bytes);
  return {.total_bytes = total_bytes_,
          .used_bytes = used_bytes_,
          .peak_bytes = peak_bytes_,
          .largest_free_bytes = largest};
}

void DeviceMemory::reset_peak() {
  MutexLock lock(mutex_);
  peak_bytes_ = used_bytes_;
}

}  // namespace zinf::emulated
