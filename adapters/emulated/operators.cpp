// Which operator runs what on the emulated device.
//
// An operator runs the kernel that it has on the CPU, over the device's memory
// (run.h). By itself torch would do so only where there is nothing else:
// many operators come with a composition of other operators for devices
// without a kernel, and a composition rounds differently. The few operators
// here by name are those that make memory, cross the border between devices, or
// choose a path by the kind of device.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/histc.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

#include "adapters/emulated/cpu_aliases.h"
#include "adapters/emulated/device.h"
#include "adapters/emulated/recurrent.h"
#include "adapters/emulated/run.h"

namespace zinf::emulated {
namespace {

using c10::DispatchKey;

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>,
                 std::optional<at::MemoryFormat> memory_format) {
  if (device) check_index(device->index());
  return at::detail::empty_generic(
      size, &device_allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>,
                         std::optional<at::Device> device,
                         std::optional<bool>) {
  if (device) check_index(device->index());
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(),
      c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

// `parameter.data = parameter.data.to("emu")` keeps the parameter, and with it
// tied weights and optimizers, as for devices that torch knows.
bool may_replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  auto dense = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && (t.is_cpu() || t.is_privateuseone());
  };
  return dense(tensor) && dense(data);
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  device_allocator().recordStream(tensor.storage().data_ptr(), stream);
}

// The CPU's choice between flash attention and plain operators.
std::int64_t choose_attention(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value,
                              const std::optional<at::Tensor>& mask,
                              double dropout, bool is_causal,
                              std::optional<double> scale, bool enable_gqa) {
  return at::_fused_sdp_choice(query, key, value, mask, dropout, is_causal,
                               scale, enable_gqa);
}

// Accelerators count integers too, and models use that.
at::Tensor histc(const at::Tensor& tensor, std::int64_t bins,
                 const at::Scalar& min, const at::Scalar& max) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  CpuAliases aliases(Access::kData);
  at::Tensor cpu = aliases.to_cpu(tensor);
  if (!at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
    return aliases.to_device(at::histc(cpu, bins, min, max));
  }
  at::Tensor counts = at::histc(cpu.to(at::kDouble), bins, min, max);
  return aliases.to_device(counts.to(tensor.scalar_type()));
}

// Operators with a kernel for the CPU and a composition for other devices.
void prefer_cpu_kernels(torch::Library& aten) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.getNamespace() != "aten") continue;
    auto has = [&](DispatchKey key) {
      return op->hasKernelForDispatchKey(key);
    };
    bool composed = has(DispatchKey::CompositeImplicitAutograd) ||
                    has(DispatchKey::CompositeExplicitAutograd) ||
                    has(DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (has(DispatchKey::CPU) && composed && !has(DispatchKey::PrivateUse1)) {
      aten.impl(c10::toString(name).c_str(),
                torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
  }
}

torch::Library& library(const char* name, DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, name, key, __FILE__,
                             __LINE__);
}

}  // namespace

void register_operators() {
  torch::Library& aten = library("aten", DispatchKey::PrivateUse1);
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
  aten.impl("_has_compatible_shallow_copy_type", &may_replace_data);
  aten.impl("histc", &histc);
  aten.impl("record_stream", &record_stream);
  for (DispatchKey key :
       {DispatchKey::PrivateUse1, DispatchKey::AutogradPrivateUse1}) {
    torch::Library& composed = library("aten", key);
    composed.impl("lstm.input", &lstm);
    composed.impl("_thnn_fused_lstm_cell", &lstm_cell);
    composed.impl("_thnn_fused_gru_cell", &gru_cell);
  }
  // The copy applies them; torch would make a copy first, by this operator.
  for (DispatchKey key : {DispatchKey::Conjugate, DispatchKey::Negative}) {
    library("aten", key)
        .impl("_copy_from", torch::CppFunction::makeFallthrough());
  }
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(
      &choose_attention);
  for (const char* name : {"convolution", "convolution_backward"}) {
    aten.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  prefer_cpu_kernels(aten);
  library("_", DispatchKey::PrivateUse1)
      .fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace zinf::emulated
