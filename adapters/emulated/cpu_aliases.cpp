#include "adapters/emulated/cpu_aliases.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <utility>

#include "adapters/emulated/device.h"

namespace zinf::emulated {
namespace {

// A tensor over `storage` that is otherwise like `model`.
at::Tensor make_like(const at::Tensor& model, c10::Storage storage,
                     c10::DispatchKeySet keys) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      model.layout() == at::kStrided && !model.is_quantized(),
      "emu: only dense tensors, not ", model.toString());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), keys, model.dtype());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(model.sizes(), model.strides(),
                              model.storage_offset());
  impl->_set_conj(model.is_conj());
  impl->_set_neg(model.is_neg());
  if (model.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return tensor;
}

bool same_geometry(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset();
}

// Over memory that somebody else keeps.
c10::Storage cpu_storage(void* address, std::size_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      c10::DataPtr(address, c10::kCPU), c10::GetCPUAllocator(),
      /*resizable=*/true));
}

}  // namespace

CpuAliases::CpuAliases(Access access) : access_(access) {
  if (access != Access::kData) return;
  Stream& stream = streams().current_stream();
  mark(stream).wait();
  stream.check();
}

at::Tensor CpuAliases::unowned(const at::Tensor& host) {
  const c10::Storage& storage = host.storage();
  return make_like(host, cpu_storage(storage.mutable_data(), storage.nbytes()),
                   c10::DispatchKeySet(c10::DispatchKey::CPU));
}

at::Tensor CpuAliases::to_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto known = tensor_index_.find(tensor.unsafeGetTensorImpl());
  if (known != tensor_index_.end()) return tensors_[known->second].cpu;
  at::Tensor cpu = make_like(tensor, to_cpu(tensor.storage()),
                             c10::DispatchKeySet(c10::DispatchKey::CPU));
  // Some kernels choose their path by it.
  if (tensor.requires_grad()) cpu.set_requires_grad(true);
  add(tensor, cpu);
  return cpu;
}

c10::Storage CpuAliases::to_cpu(const c10::Storage& storage) {
  auto known = storage_index_.find(storage.unsafeGetStorageImpl());
  if (known != storage_index_.end()) return storages_[known->second].cpu;
  const void* shown = access_ == Access::kMetadata ? storage.data_ptr().get()
                                                   : storage.mutable_data();
  void* address = memory().kernel_address(shown);
  TORCH_CHECK(address != nullptr || storage.nbytes() == 0 ||
                  access_ == Access::kMetadata,
              "emu: a storage of ", storage.nbytes(), " bytes at ", shown,
              " is not in the device's memory");
  c10::Storage cpu = cpu_storage(address, storage.nbytes());
  add(storage, cpu);
  return cpu;
}

at::Tensor CpuAliases::to_device(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto known = tensor_index_.find(tensor.unsafeGetTensorImpl());
  if (known != tensor_index_.end()) return tensors_[known->second].device;
  return make_like(tensor, to_device(tensor.storage()), keys_for(tensor));
}

// As torch's views: what somebody has put on the argument stays on it.
c10::DispatchKeySet CpuAliases::keys_for(const at::Tensor& result) const {
  auto base = std::ranges::find_if(tensors_, [&](const auto& twins) {
    return twins.cpu.storage().is_alias_of(result.storage());
  });
  if (base != tensors_.end()) return base->device.key_set();
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

c10::Storage CpuAliases::to_device(const c10::Storage& storage) {
  auto known = storage_index_.find(storage.unsafeGetStorageImpl());
  if (known != storage_index_.end()) return storages_[known->second].device;
  c10::Storage device(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, &device_allocator(),
      /*resizable=*/true));
  replace_content(*device.unsafeGetStorageImpl(), storage.nbytes(),
                  storage.data(), storage.nbytes());
  add(device, storage);
  return device;
}

bool CpuAliases::was_replaced(const Twins<c10::Storage>& twins) {
  const void* own = memory().kernel_address(twins.device.data_ptr().get());
  return twins.cpu.nbytes() != twins.device.nbytes() || twins.cpu.data() != own;
}

bool CpuAliases::changed() const {
  bool replaced = std::ranges::any_of(storages_, was_replaced);
  return replaced || std::ranges::any_of(tensors_, [&](const auto& twins) {
           return storage_number(twins.cpu.storage()) < 0 ||
                  !same_geometry(twins.device, twins.cpu);
         });
}

std::optional<std::size_t> CpuAliases::argument_number(
    const at::Tensor& cpu) const {
  auto known = tensor_index_.find(cpu.unsafeGetTensorImpl());
  if (known == tensor_index_.end()) return std::nullopt;
  return known->second;
}

std::int64_t CpuAliases::storage_number(const c10::Storage& cpu) const {
  auto known = storage_index_.find(cpu.unsafeGetStorageImpl());
  if (known == storage_index_.end()) return -1;
  return static_cast<std::int64_t>(known->second);
}

void CpuAliases::write_back() {
  for (const Twins<c10::Storage>& twins : storages_) {
    if (!was_replaced(twins)) continue;
    replace_content(*twins.device.unsafeGetStorageImpl(), twins.cpu.nbytes(),
                    twins.cpu.data(), twins.cpu.nbytes());
  }
  for (const Twins<at::Tensor>& twins : tensors_) {
    c10::Storage storage = to_device(twins.cpu.storage());
    bool same_storage = storage.is_alias_of(twins.device.storage());
    if (same_storage && same_geometry(twins.device, twins.cpu)) continue;
    c10::TensorImpl* impl = twins.device.unsafeGetTensorImpl();
    if (!same_storage) impl->set_storage_keep_dtype(std::move(storage));
    impl->set_sizes_and_strides(twins.cpu.sizes(), twins.cpu.strides(),
                                twins.cpu.storage_offset());
  }
}

void CpuAliases::add(c10::Storage device, c10::Storage cpu) {
  storage_index_[device.unsafeGetStorageImpl()] = storages_.size();
  storage_index_[cpu.unsafeGetStorageImpl()] = storages_.size();
  storages_.push_back({std::move(device), std::move(cpu)});
}

void CpuAliases::add(at::Tensor device, at::Tensor cpu) {
  tensor_index_[device.unsafeGetTensorImpl()] = tensors_.size();
  tensor_index_[cpu.unsafeGetTensorImpl()] = tensors_.size();
  tensors_.push_back({std::move(device), std::move(cpu)});
}

}  // namespace zinf::emulated
