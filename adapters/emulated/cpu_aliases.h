// CPU tensors over the memory of device tensors, for one kernel's run.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace zinf::emulated {

// What a kernel does to the arguments: it needs what the current stream has
// still to do to them, it runs after that in the stream, or it only looks at
// sizes and strides, and then the memory may be gone.
enum class Access : std::uint8_t { kData, kLater, kMetadata };

// One thread, and under a guard that keeps autograd off: it has been dealt with
// above.
//
// Tensors that share a storage share one here too, so that kernels see which
// arguments overlap, and what a kernel returns finds the way back: an argument
// is that argument, a view of one shares its storage, anything else is copied
// into the device's memory.
class CpuAliases {
 public:
  // With kData it waits for the current stream, and throws its errors.
  explicit CpuAliases(Access access);

  // A tensor over the same memory that does not keep it.
  static at::Tensor unowned(const at::Tensor& host);

  // The kernel's arguments; what is not on the device stays as it is.
  at::Tensor to_cpu(const at::Tensor& tensor);
  c10::Storage to_cpu(const c10::Storage& storage);

  // After the kernel: arguments that it resized, or that have another storage
  // or shape now, follow.
  void write_back();
  // Whether there are any.
  bool changed() const;

  // The kernel's results, after write_back().
  at::Tensor to_device(const at::Tensor& tensor);

  // The device's tensors among the arguments have numbers, and so have their
  // storages. Given the CPU's side: none, and -1, when it is no argument's.
  std::optional<std::size_t> argument_number(const at::Tensor& cpu) const;
  std::int64_t storage_number(const c10::Storage& cpu) const;
  const at::Tensor& argument(std::size_t number) const {
    return tensors_[number].device;
  }

 private:
  template <typename T>
  struct Twins {
    T device;
    T cpu;
  };
  // By implementation, of either side; an index into the vector below.
  using Index = std::unordered_map<const void*, std::size_t>;

  c10::Storage to_device(const c10::Storage& storage);
  c10::DispatchKeySet keys_for(const at::Tensor& result) const;
  static bool was_replaced(const Twins<c10::Storage>& twins);
  void add(c10::Storage device, c10::Storage cpu);
  void add(at::Tensor device, at::Tensor cpu);

  const Access access_;
  Index storage_index_;
  Index tensor_index_;
  std::vector<Twins<c10::Storage>> storages_;
  std::vector<Twins<at::Tensor>> tensors_;
};

}  // namespace zinf::emulated
