// torch's allocators of the emulated device: its own memory, and pinned memory
// of the host.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "adapters/emulated/memory.h"
#include "adapters/emulated/streams.h"

namespace zinf::emulated {

// Thread-safe. As torch's for other devices: a block belongs to the stream that
// is current when it is made, and it is freed in that stream's order. What
// another stream still does with it must have been told to recordStream(), or
// be waited for: else that stream finds it poisoned.
class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  DeviceAllocator(DeviceMemory& memory, Streams& streams)
      : memory_(memory), streams_(streams) {}

  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
  void free(void* block);

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex) override;
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { memory_.reset_peak(); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex) override;

 private:
  struct Owner {
    Stream* stream = nullptr;
    std::vector<Stream*> others;  // recorded
  };

  std::string refusal(std::size_t bytes) const;

  DeviceMemory& memory_;
  Streams& streams_;
  Mutex mutex_;
  std::unordered_map<void*, Owner> owners_ ZINF_GUARDED_BY(mutex_);
};

// Thread-safe. Plain host memory that knows that it is pinned. A block that the
// device still reads or writes when it is freed is kept until then.
class PinnedAllocator final : public at::HostAllocator {
 public:
  struct Use {
    std::size_t used_bytes = 0;
    std::size_t peak_bytes = 0;
  };

  c10::DataPtr allocate(std::size_t bytes) override;
  void free(void* block);
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  bool contains(const void* address) const;
  // The device uses the block at this address until the mark. False when it is
  // not pinned.
  bool record(const void* address, const Mark& until);

  bool record_event(void* block, void* context, c10::Stream stream) override;
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override;
  Use use() const;

 private:
  struct Pinned {
    std::size_t bytes = 0;
    std::map<Stream*, Stream::Ticket> uses;
  };
  using Blocks = std::map<const std::byte*, Pinned>;

  Blocks::iterator find(const void* address) ZINF_REQUIRES(mutex_);

  mutable Mutex mutex_;
  Blocks blocks_ ZINF_GUARDED_BY(mutex_);
  Use use_ ZINF_GUARDED_BY(mutex_);
};

}  // namespace zinf::emulated
