#include "zinf/model_shape.h"

#include <algorithm>
#include <vector>

#include "src/base/strf.h"

namespace zinf::plan {
namespace {

// More than any model; sums of bytes stay exact enough in a double.
constexpr double kMostParams = 1e18;

}  // namespace

Status check(const ModelShape& shape) {
  std::vector<std::string> problems;
  const auto refuse = [&](std::string text) {
    problems.push_back(std::move(text));
  };
  if (shape.layers == 0) refuse("no layers");
  if (shape.hidden == 0) refuse("a hidden size of 0");
  if (shape.seq == 0) refuse("a sequence length of 0");
  if (shape.heads > 0 && shape.block_params == 0 &&
      shape.hidden % shape.heads != 0) {
    refuse(strf("%llu heads that do not divide its hidden size of %llu",
                static_cast<unsigned long long>(shape.heads),
                static_cast<unsigned long long>(shape.hidden)));
  }
  if (!(total_params(shape) <= kMostParams))
    refuse("more than 10^18 parameters");
  if (!(double(shape.seq) * double(shape.hidden) <= kMostParams))
    refuse("a sequence of more than 10^18 elements");
  if (problems.empty()) return {};
  std::string text = "a model with ";
  for (const std::string& one : problems)
    text += (&one == problems.data() ? "" : ", ") + one;
  return Status::error(Code::kInvalid, std::move(text));
}

double block_params(const ModelShape& shape) {
  if (shape.block_params > 0) return shape.block_params;
  return 12 * double(shape.hidden) * double(shape.hidden);
}

double total_params(const ModelShape& shape) {
  const double others = shape.other_params > 0
                            ? shape.other_params
                            : double(shape.vocab) * double(shape.hidden);
  return double(shape.layers) * block_params(shape) + others;
}

std::uint64_t usual_heads(std::uint64_t hidden) {
  constexpr std::uint64_t kWidth = 64;
  return hidden % kWidth == 0 ? hidden / kWidth : 1;
}

double largest_params(const ModelShape& shape) {
  if (shape.largest_params > 0) return shape.largest_params;
  const double rows = std::max(4 * double(shape.hidden), double(shape.vocab));
  return rows * double(shape.hidden);
}

double checkpoint_bytes(const ModelShape& shape, double batch, double every) {
  return 2 * batch * double(shape.seq) * double(shape.hidden) *
         double(shape.layers) / every;
}

double operator_bytes(const ModelShape& shape) {
  return 4 * largest_params(shape);
}

double recompute_bytes(const ModelShape& shape, double batch, double every) {
  const double seq = double(shape.seq);
  return batch * seq * every *
         (16 * double(shape.hidden) + 2 * double(shape.heads) * seq);
}

double forward_flops(const ModelShape& shape, double tokens) {
  const double active = shape.active_block_params > 0
                            ? shape.active_block_params
                            : block_params(shape);
  // Scores and their product with the values: two maps of seq x hidden.
  const double attention =
      shape.heads > 0 ? 4 * double(shape.seq) * double(shape.hidden) : 0;
  return tokens * (2 * active + attention);
}

double head_flops(const ModelShape& shape, double tokens) {
  return 2 * tokens * double(shape.vocab) * double(shape.hidden);
}

}  // namespace zinf::plan
