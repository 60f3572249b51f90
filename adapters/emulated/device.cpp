#include "adapters/emulated/device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "src/base/mutex.h"
#include "src/base/strf.h"

namespace zinf::emulated {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

DeviceMemory* the_memory = nullptr;

void free_block(void* block) { memory().free(block); }

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, kDevice};
    void* block = memory().allocate(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, refusal(bytes));
    return {block, block, &free_block, kDevice};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(memory().kernel_address(to), memory().kernel_address(from),
                bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  DeviceStats getDeviceStats(c10::DeviceIndex) override {
    DeviceMemory::Use use = memory().use();
    c10::CachingAllocator::Stat bytes;
    bytes.current = static_cast<std::int64_t>(use.used_bytes);
    bytes.peak = static_cast<std::int64_t>(use.peak_bytes);
    DeviceStats stats;
    stats.allocated_bytes[0] = bytes;  // over all kinds of blocks
    stats.reserved_bytes[0] = bytes;
    stats.active_bytes[0] = bytes;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { memory().reset_peak(); }

  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex) override {
    DeviceMemory::Use use = memory().use();
    return {use.total_bytes - use.used_bytes, use.total_bytes};
  }

 private:
  static std::string refusal(std::size_t bytes) {
    DeviceMemory::Use use = memory().use();
    return strf(
        "emu: out of memory: %zu bytes are needed, %zu of %zu are free, "
        "the largest block has %zu",
        bytes, use.total_bytes - use.used_bytes, use.total_bytes,
        use.largest_free_bytes);
  }
};

void free_pinned(void* block);

// Thread-safe. Plain host memory that knows that it is pinned.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    void* block = c10::GetCPUAllocator()->raw_allocate(bytes);
    MutexLock lock(mutex_);
    blocks_.emplace(static_cast<const std::byte*>(block), bytes);
    return {block, block, &free_pinned, c10::kCPU};
  }

  void free(void* block) {
    {
      MutexLock lock(mutex_);
      blocks_.erase(static_cast<const std::byte*>(block));
    }
    c10::GetCPUAllocator()->raw_deallocate(block);
  }

  bool contains(const void* address) const {
    const auto* byte = static_cast<const std::byte*>(address);
    MutexLock lock(mutex_);
    auto after = blocks_.upper_bound(byte);
    if (after == blocks_.begin()) return false;
    --after;
    return byte < after->first + after->second;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  mutable Mutex mutex_;
  std::map<const std::byte*, std::size_t> blocks_ ZINF_GUARDED_BY(mutex_);
};

PinnedAllocator& pinned() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

void free_pinned(void* block) { pinned().free(block); }

// Everything is done when the call returns, so there is nothing to order.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device getDevice() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    check_index(device.index());
    return kDevice;
  }
  void setDevice(c10::Device device) const override {
    check_index(device.index());
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream();
  }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

  void record(void**, const c10::Stream&, c10::DeviceIndex,
              c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}

 private:
  static c10::Stream stream() {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_index(index);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    check_index(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* address) const override {
    return pinned().contains(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned();
  }

  // The CPU's: its kernels draw the numbers, so they are the CPU's too.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              std::size_t bytes) const override {
    const void* content = memory().kernel_address(storage.data());
    replace_content(*storage.unsafeGetStorageImpl(), bytes, content,
                    std::min(bytes, storage.nbytes()));
  }
};

}  // namespace

DeviceMemory& memory() { return *the_memory; }

c10::Allocator* allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index <= 0, "emu: there is no device ", static_cast<int>(index),
              ", only 0");
}

void replace_content(c10::StorageImpl& storage, std::size_t new_bytes,
                     const void* content, std::size_t bytes) {
  c10::DataPtr block = allocator()->allocate(new_bytes);
  if (bytes > 0 && content != nullptr) {
    std::memcpy(memory().kernel_address(block.get()), content, bytes);
  }
  storage.set_data_ptr_noswap(std::move(block));
  storage.set_nbytes(new_bytes);
}

Status start(std::size_t memory_bytes) {
  ZINF_ASSIGN(auto made, DeviceMemory::create(memory_bytes));
  the_memory = made.release();  // tensors outlive every static object
  c10::SetAllocator(kDevice.type(), allocator());
  at::setHostAllocator(kDevice.type(), &pinned());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::impl::DeviceGuardImplRegistrar(kDevice.type(), new Guard);
  register_operators();
  register_autocast();
  return {};
}

}  // namespace zinf::emulated
