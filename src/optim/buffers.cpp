// What AdamOptions and AdamBuffers refuse.
#include <array>
#include <cmath>
#include <string>

#include "src/base/align.h"
#include "src/base/strf.h"
#include "zinf/adam.h"

namespace zinf {
namespace {

// Collects problems, each a sentence part.
class Problems {
 public:
  void add(const std::string& problem) {
    text_ += (text_.empty() ? "" : "; ") + problem;
  }

  Status status(const char* of_what) const {
    if (text_.empty()) return {};
    return Status::error(Code::kInvalid,
                         strf("%s: %s", of_what, text_.c_str()));
  }

 private:
  std::string text_;
};

struct Buffer {
  const char* name;
  const void* data;
  std::size_t elem_bytes;
  bool needed;
};

bool overlap(const Buffer& a, const Buffer& b, std::size_t count) {
  auto a_begin = reinterpret_cast<std::uintptr_t>(a.data);
  auto b_begin = reinterpret_cast<std::uintptr_t>(b.data);
  return a_begin < b_begin + count * b.elem_bytes &&
         b_begin < a_begin + count * a.elem_bytes;
}

void check_format(const AdamBuffers& buffers, Problems& problems) {
  bool has_master = buffers.master != nullptr;
  bool has_low = buffers.low != nullptr;
  const char* dtype = dtype_name(buffers.weight_dtype);
  if (buffers.weight_dtype == Dtype::kFloat32) {
    if (has_master || has_low) {
      problems.add(
          "a float32 weight is its own master: master and low must be "
          "null");
    }
  } else if (has_master && has_low) {
    problems.add("master and low exclude each other");
  } else if (has_low && buffers.weight_dtype == Dtype::kFloat16) {
    problems.add("a float16 weight cannot be split: it needs master, not low");
  } else if (!has_master && !has_low && buffers.count > 0) {
    problems.add(
        strf("a %s weight needs master%s", dtype,
             buffers.weight_dtype == Dtype::kBFloat16 ? " or low" : ""));
  }
}

template <std::size_t N>
void check_memory(const std::array<Buffer, N>& all, std::size_t count,
                  Problems& problems) {
  if (count == 0) return;
  for (std::size_t i = 0; i < N; ++i) {
    const Buffer& a = all[i];
    if (a.data == nullptr) {
      if (a.needed) problems.add(strf("%s is null", a.name));
      continue;
    }
    if (!is_aligned(a.data, a.elem_bytes)) {
      problems.add(strf("%s at %p is not aligned to its %zu-byte elements",
                        a.name, a.data, a.elem_bytes));
    }
    for (std::size_t j = i + 1; j < N; ++j) {
      if (all[j].data != nullptr && overlap(a, all[j], count)) {
        problems.add(strf("%s and %s overlap", a.name, all[j].name));
      }
    }
  }
}

}  // namespace

Status AdamOptions::validate() const {
  Problems problems;
  auto check = [&problems](const char* name, double value, double below,
                           const char* range) {
    // Written so that NaN fails.
    if (!(value >= 0 && value < below)) {
      problems.add(strf("%s is %g, must be %s", name, value, range));
    }
  };
  check("lr", lr, HUGE_VAL, "finite and at least 0");
  check("beta1", beta1, 1, "at least 0 and below 1");
  check("beta2", beta2, 1, "at least 0 and below 1");
  check("eps", eps, HUGE_VAL, "finite and at least 0");
  check("weight_decay", weight_decay, HUGE_VAL, "finite and at least 0");
  if (amsgrad) {
    problems.add("amsgrad is not supported, must be false");
  }
  return problems.status("Adam options");
}

Status AdamBuffers::validate() const {
  Problems problems;
  check_format(*this, problems);
  std::array<Buffer, 6> all = {{
      {"weight", weight, dtype_bytes(weight_dtype), true},
      {"grad", grad, dtype_bytes(grad_dtype), true},
      {"exp_avg", exp_avg, sizeof(float), true},
      {"exp_avg_sq", exp_avg_sq, sizeof(float), true},
      {"master", master, sizeof(float), false},
      {"low", low, sizeof(std::uint16_t), false},
  }};
  check_memory(all, count, problems);
  if (remainder > count) {
    problems.add(
        strf("remainder is %zu, more than all %zu elements", remainder, count));
  }
  if (!block_sums.empty() && block_sums.size() != num_sum_blocks(count)) {
    problems.add(strf("block_sums has %zu numbers, %zu elements need %zu",
                      block_sums.size(), count, num_sum_blocks(count)));
  }
  return problems.status("Adam buffers");
}

}  // namespace zinf
