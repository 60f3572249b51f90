// Note [The paper's engine]: what its measurements show, rather than what its
// section 6 asks for.
//   - Gathers and reads are hidden: with them figure 6d's gains are what the
//     network's bytes take.
//   - Copies of gradients to the host are not, nor the sums that they wait for,
//     and they carry fp32: in figure 6c ZeRO-Offload's backward takes the
//     compute and 4 bytes per parameter through one link.
//   - Copies of activations are not: figure 6e.
//   - The optimizer runs after backward, at the speed of NVMe; reads and writes
//     go on at once (figure 5c: otherwise 1T would reach 22 TFLOPS, not 27).
#include "zinf/setup.h"

#include <algorithm>
#include <cmath>

#include "src/base/strf.h"
#include "src/base/suggest.h"
#include "src/plan/constants.h"

namespace zinf::plan {

std::string_view tier_name(Tier tier) {
  switch (tier) {
    case Tier::kDevice:
      return "device";
    case Tier::kHost:
      return "host";
    case Tier::kNvme:
      return "NVMe";
  }
  return "?";
}

Precision paper_precision() { return {}; }

Result<Precision> zinf_precision(std::string_view name) {
  if (name == "bf16") return Precision{.kept_grad = 2};
  if (name == "bf16-split") return Precision{.kept_grad = 2, .states = 10};
  if (name == "fp32")
    return Precision{.weight = 4, .grad = 4, .kept_grad = 4, .states = 8};
  const std::vector<std::string> known = {"bf16", "bf16-split", "fp32"};
  const std::string near = nearest_name(name, known);
  return Status::error(
      Code::kInvalid,
      strf("unknown precision \"%.*s\": %s", len(name), name.data(),
           near.empty() ? "known are bf16, bf16-split, fp32"
                        : strf("did you mean %s?", near.c_str()).c_str()));
}

Mechanisms paper_mechanisms() { return {}; }

Mechanisms zinf_mechanisms() {
  return {.overlap_grads = true,
          .overlap_activations = true,
          .update_in_backward = true,
          .keep = true,
          .load_again = false};
}

Status check(const Setup& setup) {
  ZINF_TRY(check(setup.shape));
  ZINF_TRY(check(setup.cluster));
  std::string problems;
  const auto refuse = [&](const std::string& text) {
    problems += (problems.empty() ? "" : ", ") + text;
  };
  if (!(setup.batch > 0 && setup.batch <= 1e9))
    refuse("the batch must be above 0 and at most 10^9");
  if (setup.micro_batches == 0 || setup.micro_batches > 100000)
    refuse("micro-batches must be from 1 to 100000");
  if (setup.stage < 0 || setup.stage > 3) refuse("the stage must be 0 to 3");
  if (setup.model_parallel == 0 ||
      setup.cluster.devices_per_node % setup.model_parallel != 0) {
    refuse(
        strf("model parallelism of %llu does not divide a node's %llu "
             "devices",
             static_cast<unsigned long long>(setup.model_parallel),
             static_cast<unsigned long long>(setup.cluster.devices_per_node)));
  }
  if (!(setup.activation_bytes >= 0 && setup.activation_bytes <= 1e18))
    refuse("activations must be from 0 to 10^18 bytes");
  if (setup.mechanisms.tiles == 0) refuse("tiles must be at least 1");
  if (double(setup.shape.layers) * double(setup.micro_batches) > 1e6)
    refuse("more than 10^6 layers times micro-batches");
  if (problems.empty()) return {};
  return Status::error(Code::kInvalid, "setup: " + problems);
}

double parts(const Setup& setup) {
  const double layers = double(setup.shape.layers);
  return setup.cluster.on_host ? kPartsOfLayer * layers : layers;
}

double params_per_rank(const Setup& setup, int from_stage) {
  const double params = total_params(setup.shape);
  if (setup.stage < from_stage) return params / double(setup.model_parallel);
  const Cluster& cluster = setup.cluster;
  return params / double(setup.mechanisms.node_groups ? cluster.devices_per_node
                                                      : cluster.devices());
}

double tokens_per_rank(const Setup& setup) {
  return setup.batch * double(setup.shape.seq);
}

double micro_batch(const Setup& setup) {
  if (setup.micro_batches == 1) return setup.batch;
  return std::ceil(setup.batch / double(setup.micro_batches));
}

bool keeps_grads(const Setup& setup) {
  const bool once = setup.mechanisms.vertical || setup.micro_batches == 1;
  return !setup.mechanisms.update_in_backward || !once;
}

double kept_activation_bytes(const Setup& setup, double batch) {
  if (!setup.recompute && setup.activation_bytes > 0)
    return setup.activation_bytes * batch / setup.batch;
  const double scale = setup.precision.weight / paper_precision().weight;
  if (setup.recompute) return scale * checkpoint_bytes(setup.shape, batch);
  return scale * recompute_bytes(setup.shape, batch) *
         double(setup.shape.layers);
}

double Footprint::on(Tier tier) const {
  double bytes = 0;
  for (const Taken& one : taken)
    if (one.tier == tier) bytes += one.bytes;
  return bytes;
}

namespace {

constexpr const char* kMoving = "moves under way";

// Where devices compute in host memory, a weight from NVMe is used where it was
// read to, and is among the moves.
bool uses_moved_weights(const Setup& setup) {
  return setup.cluster.on_host && setup.placement.weights == Tier::kNvme;
}

// Its gradient, and its weight where that is not among the moves.
double largest_operator_bytes(const Setup& setup) {
  const Precision& precision = setup.precision;
  const double weight = uses_moved_weights(setup) ? 0 : precision.weight;
  return (weight + precision.grad) * largest_params(setup.shape) /
         (double(setup.model_parallel) * double(setup.mechanisms.tiles));
}

// Activations beside those that are kept: of a block that is computed again, or
// gradients of the widest output and of what it was made from. Or what a loss
// makes of its scores, when no operator has its weight there.
double working_bytes(const Setup& setup, double batch) {
  const ModelShape& shape = setup.shape;
  const double precision = setup.precision.weight;
  const double tokens = batch * double(shape.seq);
  const double block =
      setup.recompute
          ? recompute_bytes(shape, batch) * precision / paper_precision().weight
          : 2 * precision * tokens * 4 * double(shape.hidden);
  // What was measured has those that are kept.
  const bool measured = !setup.recompute && setup.activation_bytes > 0;
  const double copies = measured ? kScores - kKeptScores : kScores;
  const double scores = copies * 4 * tokens * double(shape.vocab);
  return std::max(block, scores - largest_operator_bytes(setup));
}

// What computing takes at the worst moment.
void add_working(const Setup& setup, std::vector<Taken>& taken) {
  const double micro = micro_batch(setup);
  taken.push_back({uses_moved_weights(setup)
                       ? "largest operator's gradient"
                       : "largest operator's weight and gradient",
                   Tier::kDevice, largest_operator_bytes(setup)});
  taken.push_back(
      {"activations at work", Tier::kDevice, working_bytes(setup, micro)});
}

// Memory comes in blocks of which the last of each kind is not full: of
// activations, small tensors, a gradient and moves.
void add_rounding(const Setup& setup, std::vector<Taken>& taken) {
  if (setup.cluster.on_host)
    taken.push_back({"blocks that are not full", Tier::kHost, kRoundingBytes});
}

void add_activations(const Setup& setup, std::vector<Taken>& taken) {
  const bool whole = setup.mechanisms.vertical;
  const double bytes =
      kept_activation_bytes(setup, whole ? setup.batch : micro_batch(setup));
  taken.push_back(
      {"activations for backward", setup.placement.activations, bytes});
  if (setup.placement.activations == Tier::kNvme) {
    taken.push_back({"activations on their way", Tier::kHost,
                     bytes * std::min(1.0, kMovingParts / parts(setup))});
  }
}

void add_states(const Setup& setup, std::vector<Taken>& taken) {
  const Precision& precision = setup.precision;
  const Placement& at = setup.placement;
  const bool kept = keeps_grads(setup);
  taken.push_back(
      {"weights", at.weights, precision.weight * params_per_rank(setup, 3)});
  // Off the device gradients are kept beside those that backward makes.
  const double grads = params_per_rank(setup, 2);
  if (kept && at.grads == Tier::kDevice) {
    taken.push_back({"gradients", Tier::kDevice, precision.grad * grads});
  }
  if (kept && setup.precision.kept_grad > setup.precision.grad) {
    taken.push_back({"fp32 gradients", at.grads,
                     precision.kept_grad * params_per_rank(setup, 1)});
  } else if (kept && at.grads != Tier::kDevice) {
    taken.push_back({"gradients", at.grads, precision.kept_grad * grads});
  }
  taken.push_back({"optimizer states", at.states,
                   precision.states * params_per_rank(setup, 1)});
}

// What is on its way between host and NVMe: so many parts, but not less than
// the largest parameter, whose update has all of its states there at once. An
// embedding is often larger than layers are.
void add_moving(const Setup& setup, std::vector<Taken>& taken) {
  double bytes = 0;
  const Placement& at = setup.placement;
  if (at.weights == Tier::kNvme)
    bytes += setup.precision.weight * params_per_rank(setup, 3);
  if (at.states == Tier::kNvme)
    bytes += setup.precision.states * params_per_rank(setup, 1);
  if (at.grads == Tier::kNvme && keeps_grads(setup))
    bytes += setup.precision.kept_grad * params_per_rank(setup, 1);
  if (bytes == 0) return;
  const double some = kMovingParts / parts(setup);
  const double largest = largest_params(setup.shape) /
                         total_params(setup.shape) /
                         double(setup.mechanisms.tiles);
  taken.push_back(
      {kMoving, Tier::kHost, bytes * std::min(1.0, std::max(some, largest))});
}

}  // namespace

Footprint footprint(const Setup& setup) {
  Footprint all;
  add_states(setup, all.taken);
  add_activations(setup, all.taken);
  add_working(setup, all.taken);
  add_moving(setup, all.taken);
  add_rounding(setup, all.taken);
  if (setup.cluster.on_host) {
    for (Taken& one : all.taken)
      if (one.tier == Tier::kDevice) one.tier = Tier::kHost;
  }
  return all;
}

double moving_bytes(const Footprint& footprint) {
  double bytes = 0;
  for (const Taken& one : footprint.taken)
    if (one.what == kMoving) bytes += one.bytes;
  return bytes;
}

double capacity(const Cluster& cluster, Tier tier) {
  const auto ranks = double(cluster.devices_per_node);
  switch (tier) {
    case Tier::kDevice:
      return cluster.on_host ? 0 : cluster.device_bytes;
    case Tier::kHost:
      return cluster.host_bytes / ranks;
    case Tier::kNvme:
      return cluster.nvme_bytes / ranks;
  }
  return 0;
}

}  // namespace zinf::plan
