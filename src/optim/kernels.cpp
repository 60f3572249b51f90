// Compiled with -O3 -fno-math-errno -ffp-contract=off whatever the build type:
// without -fno-math-errno sqrt keeps the loops scalar (2.5 times slower), and
// contraction would give each instruction set its own results.
//
// Copies by attribute and chosen by hand: target_clones crashes under TSan, and
// files compiled with -mavx2 leak such code into inline functions that others
// use.
#include "src/optim/kernels.h"

#include "src/base/check.h"

namespace zinf {
namespace {

namespace baseline {
#define ZINF_TARGET
#include "src/optim/kernels-inl.h"
#undef ZINF_TARGET
}  // namespace baseline

#if defined(__x86_64__)
#define ZINF_HAS_X86 1

namespace avx2 {
#define ZINF_TARGET __attribute__((target("avx2,fma")))
#include "src/optim/kernels-inl.h"
#undef ZINF_TARGET
}  // namespace avx2

namespace avx512 {
#define ZINF_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include "src/optim/kernels-inl.h"
#undef ZINF_TARGET
}  // namespace avx512
#endif

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return "baseline";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

bool isa_supported(Isa isa) {
#ifdef ZINF_HAS_X86
  bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::kAvx2) return has_avx2;
  if (isa == Isa::kAvx512) {
    return has_avx2 && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::kBaseline;
}

Isa best_isa() {
  static const Isa best = isa_supported(Isa::kAvx512) ? Isa::kAvx512
                          : isa_supported(Isa::kAvx2) ? Isa::kAvx2
                                                      : Isa::kBaseline;
  return best;
}

const Kernels& kernels(Isa isa) {
  ZINF_CHECK(isa_supported(isa), "this CPU has no %s", isa_name(isa));
#ifdef ZINF_HAS_X86
  if (isa == Isa::kAvx2) return avx2::kTable;
  if (isa == Isa::kAvx512) return avx512::kTable;
#endif
  return baseline::kTable;
}

}  // namespace zinf
