#include "adapters/emulated/device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zinf::emulated {
namespace {

DeviceMemory* the_memory = nullptr;
Streams* the_streams = nullptr;

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
    mark(streams().current_stream()).wait();
    const void* content = memory().kernel_address(storage.data());
    replace_content(*storage.unsafeGetStorageImpl(), bytes, content,
                    std::min(bytes, storage.nbytes()));
  }
};

}  // namespace

DeviceMemory& memory() { return *the_memory; }

Streams& streams() { return *the_streams; }

DeviceAllocator& device_allocator() {
  static auto* allocator = new DeviceAllocator(memory(), streams());
  return *allocator;
}

PinnedAllocator& pinned() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index <= 0, "emu: there is no device ", static_cast<int>(index),
              ", only 0");
}

void replace_content(c10::StorageImpl& storage, std::size_t new_bytes,
                     const void* content, std::size_t bytes) {
  c10::DataPtr block = device_allocator().allocate(new_bytes);
  if (bytes > 0 && content != nullptr) {
    std::memcpy(memory().kernel_address(block.get()), content, bytes);
  }
  storage.set_data_ptr_noswap(std::move(block));
  storage.set_nbytes(new_bytes);
}

Status start(std::size_t memory_bytes) {
  ZINF_ASSIGN(auto made, DeviceMemory::create(memory_bytes));
  ZINF_ASSIGN(auto made_streams, Streams::create());
  the_memory = made.release();  // tensors outlive every static object
  the_streams = made_streams.release();
  c10::SetAllocator(kDevice.type(), &device_allocator());
  at::setHostAllocator(kDevice.type(), &pinned());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  register_guard();
  register_operators();
  register_autocast();
  return {};
}

}  // namespace zinf::emulated
