#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "adapters/emulated/device.h"

namespace zinf::emulated {

void register_autocast() {
  using namespace at::autocast;  // torch's macros need it, and the name `m`
  using at::IntArrayRef;
  using at::ScalarType;
  using at::Tensor;
  using c10::Scalar;
  constexpr auto kKey = c10::DispatchKey::AutocastPrivateUse1;
  static auto& rest =
      *new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  rest.fallback(torch::CppFunction::makeFallthrough());
  static auto& m = *new torch::Library(torch::Library::IMPL, "aten", kKey,
                                       __FILE__, __LINE__);
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FP32)
#define OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(
      KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace zinf::emulated
