#include "adapters/torch/device_adam.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "adapters/torch/pins.h"
#include "src/optim/adam_with.h"

namespace zinf {
namespace {

constexpr std::int64_t kPieceElements = std::int64_t{1} << 18;

at::Tensor in_double(const at::Tensor& x) { return x.to(at::kDouble); }

// The float64 sum, which is a + b rounded to odd instead of to nearest: where
// it is not exact and even, it becomes the neighbour on the other side of the
// true sum.
at::Tensor add_to_odd(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor sum = a + b;
  at::Tensor part = sum - a;
  at::Tensor error = (a - (sum - part)).add_(b - part);
  at::Tensor bits = sum.view(at::kLong);
  at::Tensor moves = error.ne(0)
                         .logical_and_(sum.abs().lt(HUGE_VAL))
                         .logical_and_(bits.bitwise_and(1).eq(0));
  at::Tensor away = error.lt(0).eq_(sum.lt(0));  // from zero: the next bits
  at::Tensor step = away.to(at::kLong).mul_(2).sub_(1).mul_(moves);
  return bits.add(step).view(at::kDouble);
}

// a * b + c, rounded once; products of two float32 are exact in float64.
at::Tensor fused(const at::Tensor& a, const at::Tensor& b,
                 const at::Tensor& c) {
  return add_to_odd(in_double(a).mul_(in_double(b)), in_double(c))
      .to(at::kFloat);
}

at::Tensor fused(const at::Tensor& a, float b, const at::Tensor& c) {
  return add_to_odd(in_double(a).mul_(double{b}), in_double(c)).to(at::kFloat);
}

at::Tensor root(const at::Tensor& x) {
  return in_double(x).sqrt_().to(at::kFloat);
}

at::Tensor canonical_nan(const at::Tensor& x) {
  at::Tensor nan = at::full({}, std::numeric_limits<float>::quiet_NaN(),
                            x.options().dtype(at::kFloat));
  return at::where(x.ne(x), nan, x);
}

// [Note: one cast rule] in zinf/cast.h.
at::Tensor narrow(const at::Tensor& x, at::ScalarType dtype) {
  at::Tensor canonical = canonical_nan(x);
  if (dtype == at::kHalf) return canonical.to(at::kHalf);
  return canonical.view(at::kInt)
      .add(0x8000)
      .bitwise_right_shift(16)
      .to(at::kShort)
      .view(at::kBFloat16);
}

// As follow_edits() of zinf/cast.h.
at::Tensor followed(const at::Tensor& weight, const at::Tensor& master) {
  at::Tensor cast = narrow(master, weight.scalar_type());
  at::Tensor same = cast.view(at::kShort).eq(weight.view(at::kShort));
  return at::where(same, master, weight.to(at::kFloat));
}

// What the steps of an element are, for a piece of the tensors.
class Piece {
 public:
  Piece(const AdamTensors& tensors, std::int64_t begin, std::int64_t elements)
      : weight_(part(tensors.weight, begin, elements)),
        grad_(part(tensors.grad, begin, elements)),
        exp_avg_(part(tensors.exp_avg, begin, elements)),
        exp_avg_sq_(part(tensors.exp_avg_sq, begin, elements)) {
    if (tensors.master) master_ = part(*tensors.master, begin, elements);
  }

  void update(const AdamScalars& scalars, WeightDecay decay,
              Rounding rounding) {
    at::Tensor old = master_.defined() ? followed(weight_, master_) : weight_;
    at::Tensor g = grad_.to(at::kFloat).mul(scalars.inverse_scale);
    g.mul_(scalars.clip);
    if (decay == WeightDecay::kL2) {
      g = fused(old, scalars.l2, g);
    } else {
      old = old.mul(scalars.decay);
    }
    const at::Tensor& base = scalars.lerp == Lerp::kFromGrad ? g : exp_avg_;
    at::Tensor exp_avg = fused(g - exp_avg_, scalars.lerp_weight, base);
    at::Tensor exp_avg_sq = squares(g, scalars, rounding);
    at::Tensor correction =
        at::full({1}, scalars.sqrt_correction2, g.options());
    at::Tensor below = root(exp_avg_sq).div_(correction).add_(scalars.eps);
    old = old.add(exp_avg.mul(scalars.minus_step_size).div_(below));
    exp_avg_.copy_(canonical_nan(exp_avg));
    exp_avg_sq_.copy_(canonical_nan(exp_avg_sq));
    store(canonical_nan(old));
  }

 private:
  // Elements are taken in the order of memory.
  static at::Tensor part(const at::Tensor& tensor, std::int64_t begin,
                         std::int64_t elements) {
    return tensor.detach().as_strided({elements}, {1},
                                      tensor.storage_offset() + begin);
  }

  at::Tensor squares(const at::Tensor& g, const AdamScalars& scalars,
                     Rounding rounding) const {
    at::Tensor scaled = g.mul(scalars.one_minus_beta2);
    if (rounding == Rounding::kBody) {
      return fused(scaled, g, exp_avg_sq_.mul(scalars.beta2));
    }
    return fused(exp_avg_sq_, scalars.beta2, scaled.mul_(g));
  }

  void store(const at::Tensor& weight) {
    if (!master_.defined()) {
      weight_.copy_(weight);
      return;
    }
    master_.copy_(weight);
    weight_.copy_(narrow(weight, weight_.scalar_type()));
  }

  at::Tensor weight_;
  at::Tensor grad_;
  at::Tensor exp_avg_;
  at::Tensor exp_avg_sq_;
  at::Tensor master_;
};

Status check(const AdamTensors& tensors) {
  std::int64_t numel = tensors.weight.numel();
  for (const at::Tensor& tensor :
       {tensors.grad, tensors.exp_avg, tensors.exp_avg_sq,
        tensors.master.value_or(tensors.weight)}) {
    if (tensor.device() == tensors.weight.device() && tensor.numel() == numel &&
        tensor.strides() == tensors.weight.strides() &&
        tensor.is_non_overlapping_and_dense()) {
      continue;
    }
    return Status::error(Code::kInvalid,
                         "Adam: tensors of one update must be dense, of one "
                         "shape and layout, and on one device");
  }
  if (!tensors.low) return {};
  return Status::error(Code::kUnsupported,
                       "Adam: no split masters on a device");
}

}  // namespace

Status adam_update_on_device(const AdamOptions& options, const AdamStep& step,
                             const AdamTensors& tensors) {
  ZINF_TRY(options.validate());
  ZINF_TRY(check(tensors));
  at::NoGradGuard no_grad;
  Pins pins;
  hold(pins, tensors);
  AdamScalars scalars = adam_scalars(options, step);
  std::int64_t numel = tensors.weight.numel();
  auto remainder = static_cast<std::int64_t>(
      torch_remainder(static_cast<std::size_t>(numel)));
  std::int64_t body = numel - remainder;
  for (std::int64_t at = 0; at < body; at += kPieceElements) {
    Piece(tensors, at, std::min(kPieceElements, body - at))
        .update(scalars, options.decay, Rounding::kBody);
  }
  if (remainder > 0) {
    Piece(tensors, body, remainder)
        .update(scalars, options.decay, Rounding::kRemainder);
  }
  return {};
}

}  // namespace zinf
