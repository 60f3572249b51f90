// The memory of the emulated device: bounded, and out of the host's reach.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <memory>

#include "src/base/mutex.h"
#include "zinf/status.h"

namespace zinf::emulated {

// What is freed is filled with it: NaNs, and the index -1.
inline constexpr int kPoison = 0xFF;

// Thread-safe. The same pages are mapped twice: at the addresses that tensors
// show they can never be touched, the device's own kernels and copies use the
// second mapping. So whoever takes device memory for host memory dies at once,
// also while a kernel runs elsewhere, and no protection is ever switched.
class DeviceMemory {
 public:
  struct Use {
    std::size_t total_bytes = 0;
    std::size_t used_bytes = 0;  // every block counts in multiples of 64
    std::size_t peak_bytes = 0;
    std::size_t largest_free_bytes = 0;
  };

  static Result<std::unique_ptr<DeviceMemory>> create(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // A block (best fit, 64-byte aligned as torch's own on the CPU); null when no
  // free one is that large.
  void* allocate(std::size_t bytes) ZINF_EXCLUDES(mutex_);

  // The block counts no longer, and nobody gets it before reclaim(), for which
  // the device's work on it may have to end first.
  void release(void* block) ZINF_EXCLUDES(mutex_);

  // Poisons the block.
  void reclaim(void* block) ZINF_EXCLUDES(mutex_);

  // False in a forked child: there nothing may be done.
  bool belongs_here() const;

  // Where kernels find what tensors see at `address`; null when that is not
  // device memory.
  void* kernel_address(const void* address) const;

  Use use() const ZINF_EXCLUDES(mutex_);
  void reset_peak() ZINF_EXCLUDES(mutex_);

 private:
  DeviceMemory(std::byte* shown, std::byte* hidden, std::size_t bytes);
  std::size_t offset_of(const void* block) const;

  std::byte* const shown_;
  std::byte* const hidden_;
  const std::size_t total_bytes_;
  const pid_t owner_;

  mutable Mutex mutex_;
  // Offset -> bytes.
  std::map<std::size_t, std::size_t> free_ ZINF_GUARDED_BY(mutex_);
  std::map<std::size_t, std::size_t> used_ ZINF_GUARDED_BY(mutex_);
  std::map<std::size_t, std::size_t> released_ ZINF_GUARDED_BY(mutex_);
  std::size_t used_bytes_ ZINF_GUARDED_BY(mutex_) = 0;
  std::size_t peak_bytes_ ZINF_GUARDED_BY(mutex_) = 0;
};

}  // namespace zinf::emulated
