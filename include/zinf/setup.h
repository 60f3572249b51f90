// A Setup: what is trained, on what, with which states where, and by which
// mechanisms. Everything that a forecast depends on.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zinf/cluster.h"
#include "zinf/model_shape.h"
#include "zinf/status.h"

namespace zinf::plan {

enum class Tier : std::uint8_t { kDevice, kHost, kNvme };
inline constexpr std::array kTiers = {Tier::kDevice, Tier::kHost, Tier::kNvme};
std::string_view tier_name(Tier tier);  // "device", "host", "NVMe"

// Where each state lives between its uses.
struct Placement {
  Tier weights = Tier::kDevice;
  Tier grads = Tier::kDevice;
  Tier states = Tier::kDevice;  // the optimizer's
  Tier activations = Tier::kDevice;
};

// Bytes per parameter.
struct Precision {
  double weight = 2;
  double grad = 2;       // as backward makes it, on the device
  double kept_grad = 4;  // off the device
  double states = 12;    // master weight and two moments
};
// The paper's 20 bytes: fp16 weight and gradient, fp32 gradient and states.
Precision paper_precision();
// zinf's: "bf16", "bf16-split" (of the master only the missing 16 bits),
// "fp32". kInvalid for others, with the nearest.
Result<Precision> zinf_precision(std::string_view name);

// What is done to hide or save moves. Each can be chosen by itself.
struct Mechanisms {
  bool overlap = true;               // gathers, reads and sums behind compute
  bool overlap_grads = false;        // copies of gradients to the host
  bool overlap_activations = false;  // their copies to the host and back
  bool update_in_backward = false;   // else after it, with nothing beside it
  bool keep = false;         // what fits in host memory is not moved to NVMe
  bool vertical = false;     // a layer serves all micro-batches in turn
  bool node_groups = false;  // split inside a node; nodes are replicas
  // A block's weights are copied and gathered for recomputation and again for
  // backward (three loads per step, as the paper counts them).
  bool load_again = true;
  // A parameter lies whole on one rank, which alone moves it (ZeRO-Offload).
  bool owners = false;
  std::uint64_t tiles = 1;  // parts in which the largest operators run
};
// Those of the paper's runs. See Note [The paper's engine] in
// src/plan/setup.cpp.
Mechanisms paper_mechanisms();
Mechanisms zinf_mechanisms();

struct Setup {
  ModelShape shape;
  Cluster cluster;
  double batch = 1;  // samples per device and step
  std::uint64_t micro_batches = 1;
  std::uint64_t model_parallel = 1;  // devices that share every layer
  // What is split over ranks: 0 nothing, 1 states, 2 gradients too, 3 all.
  int stage = 3;
  bool recompute = true;  // activations between the blocks' inputs
  // What a forward pass of the whole batch leaves for backward, where it was
  // measured (without recomputation); 0: by the paper's formula.
  double activation_bytes = 0;
  Precision precision;
  Placement placement;
  Mechanisms mechanisms;
};

// kInvalid with every problem in one text.
Status check(const Setup& setup);

// Samples of the largest micro-batch.
double micro_batch(const Setup& setup);

// Whether gradients wait for their update: not when it is made inside backward,
// unless several micro-batches add to them.
bool keeps_grads(const Setup& setup);

// What a forward pass of so many samples leaves for backward.
double kept_activation_bytes(const Setup& setup, double batch);

// What the model is cut into for moves and their simulation: layers, or parts
// of them where devices compute in host memory.
double parts(const Setup& setup);

// Parameters of which a rank holds the state, when its kind is split or not.
double params_per_rank(const Setup& setup, int from_stage);
double tokens_per_rank(const Setup& setup);

// Something that takes memory of one rank all the time, or at the worst moment.
struct Taken {
  std::string what;
  Tier tier = Tier::kDevice;
  double bytes = 0;
};

// Of one rank; on a cluster whose devices compute in host memory nothing is on
// the device tier.
struct Footprint {
  std::vector<Taken> taken;
  double on(Tier tier) const;
};
Footprint footprint(const Setup& setup);
// Of these, what is on its way between host memory and NVMe.
double moving_bytes(const Footprint& footprint);

// What a rank may take: an equal part of its node's.
double capacity(const Cluster& cluster, Tier tier);

}  // namespace zinf::plan
