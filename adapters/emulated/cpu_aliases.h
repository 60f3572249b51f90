// CPU tensors over the memory of device tensors, for one kernel's run.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace zinf::emulated {

// What a kernel does to the arguments. One that only looks at sizes and strides
// may be given tensors whose memory is gone.
enum class Access : std::uint8_t { kData, kMetadata };

// One thread. While it lives, autograd is off: it has been dealt with above.
//
// Tensors that share a storage share one here too, so that kernels see which
// arguments overlap, and what a kernel returns finds the way back: an argument
// is that argument, a view of one shares its storage, anything else is copied
// into the device's memory.
class CpuAliases {
 public:
  explicit CpuAliases(Access access) : access_(access) {}

  // The kernel's arguments; what is not on the device stays as it is.
  at::Tensor to_cpu(const at::Tensor& tensor);
  c10::Storage to_cpu(const c10::Storage& storage);

  // After the kernel: arguments that it resized, or that have another storage
  // or shape now, follow.
  void write_back();

  // The kernel's results, after write_back().
  at::Tensor to_device(const at::Tensor& tensor);

 private:
  template <typename T>
  struct Twins {
    T device;
    T cpu;
  };
  // By implementation, of either side; an index into the vector below.
  using Index = std::unordered_map<const void*, std::size_t>;

  c10::Storage to_device(const c10::Storage& storage);
  void add(c10::Storage device, c10::Storage cpu);
  void add(at::Tensor device, at::Tensor cpu);

  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  const Access access_;
  Index storage_index_;
  Index tensor_index_;
  std::vector<Twins<c10::Storage>> storages_;
  std::vector<Twins<at::Tensor>> tensors_;
};

}  // namespace zinf::emulated
