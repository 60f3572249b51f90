#include <algorithm>

#include "src/plan/paper_parts.h"

namespace zinf::plan {

ModelShape paper_model(const std::string& name, std::uint64_t layers,
                       std::uint64_t hidden, std::uint64_t heads) {
  // Not given where it does not matter: 128 elements per head.
  const std::uint64_t some = std::max<std::uint64_t>(hidden / 128, 1);
  return {.name = name,
          .layers = layers,
          .hidden = hidden,
          .heads = heads > 0 ? heads : some,
          .seq = 1024};
}

Cluster dgx2(std::uint64_t nodes) {
  Cluster cluster = built_in_cluster("dgx2-v100").value();
  cluster.nodes = nodes;
  return cluster;
}

Cluster part_of_dgx2(std::uint64_t devices) {
  Cluster cluster = dgx2(1);
  cluster.devices_per_node = devices;
  return cluster;
}

Setup paper_setup(const ModelShape& shape, const Cluster& cluster, double batch,
                  std::uint64_t model_parallel) {
  return {.shape = shape,
          .cluster = cluster,
          .batch = batch,
          .model_parallel = model_parallel,
          .precision = paper_precision(),
          .placement = {},
          .mechanisms = paper_mechanisms()};
}

bool fits(const Setup& setup) {
  const Footprint taken = footprint(setup);
  return std::ranges::all_of(
      std::initializer_list<Tier>{Tier::kDevice, Tier::kHost, Tier::kNvme},
      [&](Tier tier) {
        return taken.on(tier) <= capacity(setup.cluster, tier);
      });
}

void settle_activations(Setup& setup) {
  setup.placement.activations = Tier::kDevice;
  const double device = footprint(setup).on(Tier::kDevice);
  if (device > capacity(setup.cluster, Tier::kDevice))
    setup.placement.activations = Tier::kHost;
}

void settle_states(Setup& setup) {
  setup.placement.activations = Tier::kHost;
  for (const Tier weights : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    for (const Tier states : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      if (states < weights) continue;  // weights are used more often
      setup.placement.weights = weights;
      setup.placement.states = states;
      setup.placement.grads = states;
      if (fits(setup)) return;
    }
  }
}

}  // namespace zinf::plan
