#include "zinf/cast.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "src/base/check.h"
#include "src/optim/kernels.h"
#include "src/optim/run.h"

namespace zinf {

void narrow(const float* from, Dtype to_dtype, void* to, std::size_t count,
            ThreadPool* pool) {
  const Kernels& table = kernels(best_isa());
  run_over(pool, count, [&](std::size_t begin, std::size_t end) {
    std::size_t elems = end - begin;
    if (to_dtype == Dtype::kFloat32) {
      std::memcpy(static_cast<float*>(to) + begin, from + begin,
                  elems * sizeof(float));
      return;
    }
    auto kernel = to_dtype == Dtype::kBFloat16 ? table.float_to_bf16
                                               : table.float_to_fp16;
    kernel(from + begin, static_cast<std::uint16_t*>(to) + begin, elems);
  });
}

void widen(Dtype from_dtype, const void* from, float* to, std::size_t count,
           ThreadPool* pool) {
  const Kernels& table = kernels(best_isa());
  run_over(pool, count, [&](std::size_t begin, std::size_t end) {
    std::size_t elems = end - begin;
    if (from_dtype == Dtype::kFloat32) {
      std::memcpy(to + begin, static_cast<const float*>(from) + begin,
                  elems * sizeof(float));
      return;
    }
    auto kernel = from_dtype == Dtype::kBFloat16 ? table.bf16_to_float
                                                 : table.fp16_to_float;
    kernel(static_cast<const std::uint16_t*>(from) + begin, to + begin, elems);
  });
}

void split_master(const float* master, std::uint16_t* high, std::uint16_t* low,
                  std::size_t count, ThreadPool* pool) {
  const Kernels& table = kernels(best_isa());
  run_over(pool, count, [&](std::size_t begin, std::size_t end) {
    table.split(master + begin, high + begin, low + begin, end - begin);
  });
}

void join_master(const std::uint16_t* high, const std::uint16_t* low,
                 float* master, std::size_t count, ThreadPool* pool) {
  const Kernels& table = kernels(best_isa());
  run_over(pool, count, [&](std::size_t begin, std::size_t end) {
    table.join(high + begin, low + begin, master + begin, end - begin);
  });
}

std::size_t follow_edits(Dtype dtype, const void* weight, float* master,
                         std::size_t count, ThreadPool* pool) {
  ZINF_CHECK(dtype != Dtype::kFloat32, "a float32 weight has no master");
  constexpr std::size_t kBlock = 2048;
  const auto* weights = static_cast<const std::uint16_t*>(weight);
  std::atomic<std::size_t> edited = 0;
  run_over(pool, count, [&](std::size_t begin, std::size_t end) {
    std::array<std::uint16_t, kBlock> casts;
    for (; begin < end; begin += kBlock) {
      std::size_t elems = std::min(kBlock, end - begin);
      narrow(master + begin, dtype, casts.data(), elems);
      if (std::memcmp(casts.data(), weights + begin,
                      elems * sizeof(std::uint16_t)) == 0) {
        continue;
      }
      for (std::size_t i = 0; i < elems; ++i) {
        if (casts[i] == weights[begin + i]) continue;
        widen(dtype, weights + begin + i, master + begin + i, 1);
        ++edited;
      }
    }
  });
  return edited;
}

}  // namespace zinf
