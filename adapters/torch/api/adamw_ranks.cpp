// zinf::AdamW over parameters that are split over ranks: see ranks.h.
#include <cmath>
#include <functional>

#include "adapters/torch/adam.h"
#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/later_update.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/ranks.h"
#include "src/base/strf.h"

namespace zinf {
namespace {

void check_split(const at::Tensor& parameter) {
  if (is_split_over_ranks(parameter)) return;
  throw Error(Status::error(
      Code::kUnsupported,
      "a parameter of " + std::to_string(parameter.numel()) +
          " elements is not split over the ranks, so they would train it each "
          "for itself: call engine.adopt(model) for what was not born in "
          "engine.init(); if that does not help, somebody else holds its "
          "memory"));
}

}  // namespace

std::vector<Ranks*> ranks_of(const AdamW& optimizer) {
  const std::vector<at::Tensor> parameters = all_parameters(optimizer);
  std::vector<Ranks*> found;
  for (const auto& manager : managers_of(parameters)) {
    Ranks* ranks = manager == nullptr ? nullptr : manager->ranks();
    if (ranks != nullptr) found.push_back(ranks);
  }
  if (found.empty()) return found;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) check_split(parameter);
  }
  return found;
}

std::string how_text(const AdamW& optimizer) {
  const AdamWOptions& own = options_of(optimizer.defaults());
  std::string all =
      own.update() + strf(" %d %.17g", static_cast<int>(own.micro_batches()),
                          own.max_grad_norm().value_or(-1));
  double lr = 0;
  for (const auto& group : optimizer.param_groups()) {
    const AdamOptions each = adam_options(group);
    if (&group == &optimizer.param_groups().front()) lr = each.lr;
    all += strf(" %.17g %.17g %.17g %.17g %.17g", each.lr, each.beta1,
                each.beta2, each.eps, each.weight_decay);
  }
  const auto hash = std::hash<std::string>()(all);
  return strf("lr=%g, options %08x", lr, static_cast<unsigned>(hash));
}

void make_up_passes(AdamW& optimizer, Ranks& ranks) {
  const std::string how = how_text(optimizer);
  if (AdamWImpl::of(optimizer).backward == nullptr) {
    return ranks.make_up_passes(1, {}, how);
  }
  const AdamWOptions& options = options_of(optimizer.defaults());
  Ranks::Update update;
  if (!options.max_grad_norm()) {
    update = [&optimizer](const std::vector<at::Tensor>& parameters) {
      update_deferred(optimizer, parameters);
    };
  }
  ranks.make_up_passes(static_cast<std::uint64_t>(options.micro_batches()),
                       update, how);
}

double norm_of_slices(Ranks& ranks, const std::vector<at::Tensor>& parameters) {
  double squares = 0;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor grad = shard_grad_of(parameter);
    if (!grad.defined() || grad.numel() == 0) continue;
    Result<double> sum = sum_of_squares(grad, 1, update_pool().get());
    throw_if_error(sum.status());
    squares += *sum;
  }
  return std::sqrt(ranks.sum_over_slices(squares));
}

}  // namespace zinf
