#include "src/plan/layer_costs.h"

#include <algorithm>

#include "src/plan/constants.h"

namespace zinf::plan {
namespace {

Cost at(double bytes, double rate) {
  return {.seconds = rate > 0 ? bytes / rate : 0, .bytes = bytes};
}

class Costs {
 public:
  explicit Costs(const Setup& setup)
      : setup_(setup),
        cluster_(setup.cluster),
        parts_(parts(setup)),
        part_params_(total_params(setup.shape) / parts_),
        ranks_(double(cluster_.devices_per_node)) {}

  LayerCosts all() const {
    LayerCosts costs;
    if (cluster_.nodes > 1 && !setup_.mechanisms.node_groups)
      costs.collective = Lane::kNetwork;
    add_compute(costs);
    add_weights(costs);
    add_grads(costs);
    add_update(costs);
    add_activations(costs);
    if (cluster_.nvme_read_rate > 0)
      costs.read_second = ranks_ / cluster_.nvme_read_rate;
    if (cluster_.nvme_write_rate > 0)
      costs.write_second = ranks_ / cluster_.nvme_write_rate;
    if (cluster_.nvme_rate > 0) costs.move_second = ranks_ / cluster_.nvme_rate;
    if (cluster_.on_host) costs.drag_second = cluster_.nvme_drag;
    return costs;
  }

 private:
  bool off_device(Tier tier) const {
    return tier != Tier::kDevice && !cluster_.on_host;
  }
  // Of this rank, while the others use theirs.
  double link_rate() const {
    return cluster_.link_rate /
           std::min(double(cluster_.devices_per_uplink), ranks_);
  }
  // A rank's share of a part: of a kind that is split from this stage on.
  double share(double bytes_per_param, int from_stage) const {
    return bytes_per_param * params_per_rank(setup_, from_stage) / parts_;
  }
  Cost copy(double bytes_per_param, int from_stage) const {
    if (!setup_.mechanisms.owners)
      return at(share(bytes_per_param, from_stage), link_rate());
    // One rank at a time, alone on its uplink; all others wait.
    return at(bytes_per_param * part_params_ / double(setup_.model_parallel),
              cluster_.link_rate);
  }

  // A part that every rank is to have whole (or of which every rank is to have
  // a sum's slice): into each node once, and inside it over its own links.
  Cost collective(double bytes_per_param) const {
    const double bytes = bytes_per_param * part_params_;
    const double mp = double(setup_.model_parallel);
    const double inside = ranks_ / mp;
    Cost cost =
        at(bytes / mp * (inside - 1) / inside, cluster_.device_network_rate);
    if (cluster_.nodes == 1 || setup_.mechanisms.node_groups) return cost;
    const double nodes = double(cluster_.nodes);
    const Cost between =
        at(bytes * (nodes - 1) / nodes, cluster_.node_network_rate);
    // The lane is the network's: what goes on inside the node is not among its
    // bytes.
    return {.seconds = std::max(cost.seconds, between.seconds),
            .bytes = between.bytes / ranks_};
  }

  double peak_flops() const {
    const bool fp32 = setup_.precision.weight >= 4;
    return fp32 && cluster_.fp32_peak_flops > 0 ? cluster_.fp32_peak_flops
                                                : cluster_.peak_flops;
  }

  void add_compute(LayerCosts& costs) const {
    const double layers = double(setup_.shape.layers);
    const double tokens = tokens_per_rank(setup_);
    const double once = (layers * forward_flops(setup_.shape, tokens) +
                         head_flops(setup_.shape, tokens)) /
                        (parts_ * peak_flops() * cluster_.achieved);
    const double backward = setup_.recompute ? 3 : 2;
    // Two sums of a block's outputs, and of their gradients.
    const double mp = double(setup_.model_parallel);
    const double summed = setup_.precision.weight * tokens * mp *
                          double(setup_.shape.hidden) * 2 * (mp - 1) / mp;
    const double sums =
        2 * at(summed, cluster_.device_network_rate).seconds * layers / parts_;
    costs.forward_seconds = once + sums;
    costs.backward_seconds = backward * once + (backward - 1) * sums;
    costs.model_seconds = (1 + backward) * once;
  }

  void add_weights(LayerCosts& costs) const {
    const double weight = setup_.precision.weight;
    if (off_device(setup_.placement.weights))
      costs.copy_weight = copy(weight, 3);
    if (setup_.stage == 3) costs.gather = collective(weight);
  }

  void add_grads(LayerCosts& costs) const {
    // A sum that every rank gets is a reduce-scatter and a gather.
    const double passes = setup_.stage >= 2 ? 1 : 2;
    costs.reduce = collective(passes * setup_.precision.grad);
    if (setup_.mechanisms.node_groups && cluster_.nodes > 1) {
      const double nodes = double(cluster_.nodes);
      costs.sum_nodes =
          at(2 * setup_.precision.grad * part_params_ * (nodes - 1) / nodes,
             cluster_.node_network_rate);
      costs.sum_nodes.bytes /= ranks_;
    }
    // Gradients go where the update is made.
    if (off_device(setup_.placement.grads) ||
        off_device(setup_.placement.states))
      costs.copy_grad = copy(setup_.precision.kept_grad, 1);
  }

  void add_update(LayerCosts& costs) const {
    const Tier states = setup_.placement.states;
    const bool by_device = states == Tier::kDevice && !cluster_.on_host;
    costs.update = at(share(kAdamBytes, 1),
                      by_device ? cluster_.device_memory_rate
                                : cluster_.host_memory_rate / ranks_);
    const double weight = setup_.precision.weight;
    if (off_device(states) && setup_.placement.weights == Tier::kDevice)
      costs.send_weight = copy(weight, 1);
    if (setup_.stage == 1 || setup_.stage == 2)
      costs.spread_weight = collective(weight);
  }

  void add_activations(LayerCosts& costs) const {
    if (setup_.placement.activations == Tier::kDevice) return;
    const double kept = kept_activation_bytes(setup_, setup_.batch) / parts_;
    if (!cluster_.on_host) costs.move_activations = at(kept, link_rate());
    if (setup_.placement.activations == Tier::kNvme)
      costs.activation_bytes = kept;
  }

  const Setup& setup_;
  const Cluster& cluster_;
  const double parts_;
  const double part_params_;
  const double ranks_;
};

}  // namespace

LayerCosts layer_costs(const Setup& setup) { return Costs(setup).all(); }

}  // namespace zinf::plan
