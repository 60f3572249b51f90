#include "adapters/torch/budget.h"

#include <algorithm>
#include <cstdint>

#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "src/base/align.h"
#include "src/base/strf.h"

namespace zinf {
namespace {

// Bytes in memory.
struct Sizes {
  std::uint64_t weight = 0;
  std::uint64_t grad = 0;
  std::uint64_t states = 0;
};

std::uint64_t pages(std::uint64_t bytes) {
  return align_up(bytes, std::uint64_t{kPage});
}

Sizes sizes_of(const at::Tensor& parameter, bool split) {
  at::ScalarType type = parameter.scalar_type();
  auto numel = static_cast<std::uint64_t>(parameter.numel());
  std::uint64_t master = 0;
  if (type == at::kBFloat16) master = split ? 2 : 4;
  if (type == at::kHalf) master = 4;
  std::uint64_t weight = pages(parameter.nbytes());
  return {weight, weight, 2 * pages(4 * numel) + pages(master * numel)};
}

// What stays in memory, and the rest of the update that needs most.
std::uint64_t least_bytes(const std::vector<Sizes>& sizes,
                          const HostTierOptions& tier, bool waiting) {
  auto stays = [&](Where where) {
    return where == Where::kHost || tier.nvme.empty();
  };
  bool weights_stay = stays(tier.weights);
  bool grads_stay = weights_stay && waiting;
  bool states_stay = stays(tier.states);
  std::uint64_t staying = 0;
  std::uint64_t moving = 0;
  for (const Sizes& size : sizes) {
    std::uint64_t mine = 0;
    (weights_stay ? staying : mine) += size.weight;
    (grads_stay ? staying : mine) += size.grad;
    (states_stay ? staying : mine) += size.states;
    moving = std::max(moving, mine);
  }
  return staying + moving;
}

std::string text_of(std::uint64_t bytes) {
  return strf("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

void check_budget_of(Manager& manager, const std::vector<Sizes>& sizes,
                     bool waiting) {
  const HostTierOptions& tier = manager.options().tier;
  std::uint64_t least = least_bytes(sizes, tier, waiting);
  process_memory()->trim();
  EngineStats stats = engine_stats(manager);
  std::uint64_t units = std::min(stats.resident_bytes, stats.host_used_bytes);
  std::uint64_t others = stats.host_used_bytes - units;
  if (least + others <= stats.host_limit_bytes) return;
  throw_if_error(Status::error(
      Code::kOverBudget,
      "host_memory is " + text_of(stats.host_limit_bytes) +
          ", but training this model needs at least " + text_of(least) +
          " for one update" +
          (others == 0 ? ""
                       : " beside " + text_of(others) + " of other tensors") +
          ": raise it to " + text_of(least + others) + " or more" +
          (tier.nvme.empty() ? ", or give nvme= so that states can leave memory"
                             : "")));
}

}  // namespace

void check_budget(const std::vector<at::Tensor>& parameters,
                  const UpdateNeeds& needs) {
  for (const auto& manager : managers_of(parameters)) {
    if (manager == nullptr || manager->closed()) continue;
    std::vector<Sizes> sizes;
    for (const at::Tensor& parameter : parameters) {
      if (parameter.is_cpu() && manager_of(parameter) == manager) {
        sizes.push_back(sizes_of(parameter, needs.split));
      }
    }
    if (!sizes.empty()) check_budget_of(*manager, sizes, needs.waiting);
  }
}

}  // namespace zinf
