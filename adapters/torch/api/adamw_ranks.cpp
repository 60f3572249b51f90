// zinf::AdamW over parameters that are split over ranks: see ranks.h.
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>

#include "adapters/torch/adam.h"
#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/later_update.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/ranks.h"
#include "adapters/torch/unit.h"
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

constexpr const char* kSlices = "zinf_slices";

// Of a rank: its number, how many ranks and slices there are, then begin, end
// and elements of each parameter; -1 where that is whole. Empty: none is split.
std::vector<std::int64_t> slices_of(const AdamW& optimizer) {
  std::vector<std::int64_t> all;
  const std::vector<at::Tensor> parameters = all_parameters(optimizer);
  const auto split = std::ranges::find_if(parameters, is_split_over_ranks);
  if (split == parameters.end()) return all;
  const Ranks& ranks = Unit::of(*split)->shard()->ranks;
  all = {ranks.rank(), ranks.size(), ranks.num_slices()};
  for (const at::Tensor& each : parameters) {
    if (is_split_over_ranks(each)) {
      const Slice mine = Unit::of(each)->shard()->mine;
      all.insert(all.end(),
                 {static_cast<std::int64_t>(mine.begin),
                  static_cast<std::int64_t>(mine.end), each.numel()});
    } else {
      all.insert(all.end(), {-1, -1, -1});
    }
  }
  return all;
}

std::string owner_of(const std::vector<std::int64_t>& slices) {
  if (slices.empty()) return "one process";
  return strf("rank %d of %d", static_cast<int>(slices[0]),
              static_cast<int>(slices[1]));
}

}  // namespace

void write_slices(const AdamW& optimizer,
                  torch::serialize::OutputArchive& archive) {
  const std::vector<std::int64_t> slices = slices_of(optimizer);
  if (!slices.empty()) archive.write(kSlices, c10::IValue(slices));
}

void check_slices(const AdamW& optimizer,
                  torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive states;
  archive.read("state", states);
  if (states.keys().empty()) return;
  std::vector<std::int64_t> saved;
  if (c10::IValue value; archive.try_read(kSlices, value)) {
    saved = value.toIntVector();
  }
  std::vector<std::int64_t> own = slices_of(optimizer);
  // Ranks of other groups keep the same slices.
  const auto without_rank = [](const std::vector<std::int64_t>& slices) {
    return std::span(slices).subspan(slices.empty() ? 0 : 1);
  };
  if (std::ranges::equal(without_rank(saved), without_rank(own))) return;
  throw Error(Status::error(
      Code::kInvalid,
      "these optimizer states are of " + owner_of(saved) + ", and this is " +
          owner_of(own) +
          ": with several ranks torch::save() writes the slices that one rank "
          "keeps. Save on each rank to a file of its own, and load that on the "
          "same rank of as many"));
}

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
