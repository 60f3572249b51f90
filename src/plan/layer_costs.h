// What one layer of a rank costs on each lane; or a part of one: see parts().
#pragma once

#include "zinf/setup.h"
#include "zinf/step_forecast.h"

namespace zinf::plan {

struct Cost {
  double seconds = 0;
  double bytes = 0;
  bool nothing() const { return seconds <= 0 && bytes <= 0; }
};

// For the whole batch; embeddings and head are spread over the layers.
struct LayerCosts {
  double forward_seconds = 0;   // with the sums of model parallelism
  double backward_seconds = 0;  // with recomputation
  double model_seconds = 0;     // of both, without those sums
  // Once per pass over the layer.
  Cost copy_weight;  // host to device
  Cost gather;       // of weights
  Cost reduce;       // of gradients
  Cost copy_grad;    // device to host
  // Once per step.
  Cost sum_nodes;  // network, of gradients: between replicas
  Cost update;
  Cost send_weight;    // host to device, new ones
  Cost spread_weight;  // as a gather, of new ones
  // Where gathers, sums inside a group and the spreading of weights run.
  Lane collective = Lane::kNodeLinks;
  // Of the whole batch, each way.
  Cost move_activations;        // between device and host
  double activation_bytes = 0;  // that NVMe moves each way
  // Seconds per byte of a rank.
  double read_second = 0;
  double write_second = 0;
  double move_second = 0;  // both ways together
  double drag_second = 0;  // of compute
};

// The setup was checked.
LayerCosts layer_costs(const Setup& setup);

}  // namespace zinf::plan
