#include "zinf/step_forecast.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "src/plan/layer_costs.h"
#include "src/plan/program.h"
#include "src/plan/simulation.h"

namespace zinf::plan {
namespace {

// The rates behind a lane, made `factor` times as high.
void speed_up(Cluster& cluster, Lane lane, double factor) {
  switch (lane) {
    case Lane::kCompute:
      cluster.peak_flops *= factor;
      return;
    case Lane::kHostToDevice:
    case Lane::kDeviceToHost:
      cluster.link_rate *= factor;
      return;
    case Lane::kNvmeRead:
      cluster.nvme_read_rate *= factor;
      return;
    case Lane::kNvmeWrite:
      cluster.nvme_write_rate *= factor;
      return;
    case Lane::kNodeLinks:
      cluster.device_network_rate *= factor;
      return;
    case Lane::kNetwork:
      cluster.node_network_rate *= factor;
      return;
    case Lane::kUpdate:
      cluster.host_memory_rate *= factor;
      cluster.device_memory_rate *= factor;
      return;
  }
}

}  // namespace

std::string_view lane_name(Lane lane) {
  switch (lane) {
    case Lane::kCompute:
      return "compute";
    case Lane::kHostToDevice:
      return "host to device";
    case Lane::kDeviceToHost:
      return "device to host";
    case Lane::kNvmeRead:
      return "NVMe reads";
    case Lane::kNvmeWrite:
      return "NVMe writes";
    case Lane::kNodeLinks:
      return "links of a node";
    case Lane::kNetwork:
      return "network";
    case Lane::kUpdate:
      return "updates";
  }
  return "?";
}

Result<StepForecast> forecast_step(const Setup& setup) {
  ZINF_TRY(check(setup));
  const Program program = make_program(setup);
  const LayerCosts costs = layer_costs(setup);
  ZINF_ASSIGN(const std::vector<Plan> plans, nvme_plans(setup, program));
  if (plans.empty()) return simulate_step(setup, program, costs, nullptr);
  std::optional<StepForecast> best;
  for (const Plan& plan : plans) {
    const StepForecast step = simulate_step(setup, program, costs, &plan);
    if (!best || step.seconds < best->seconds) best = step;
  }
  return *best;
}

double model_flops_per_second(const Setup& setup, const StepForecast& step) {
  const double active = setup.shape.active_block_params > 0
                            ? setup.shape.active_block_params
                            : block_params(setup.shape);
  const double per_token =
      (setup.recompute ? 8 : 6) * active * double(setup.shape.layers) +
      6 * double(setup.shape.vocab) * double(setup.shape.hidden);
  return per_token * tokens_per_rank(setup) / step.seconds;
}

Result<std::vector<Bound>> bounds(const Setup& setup) {
  ZINF_ASSIGN(const StepForecast now, forecast_step(setup));
  std::vector<Bound> all;
  for (std::size_t i = 0; i < kLanes; ++i) {
    const auto lane = static_cast<Lane>(i);
    // One link for both ways.
    if (lane == Lane::kDeviceToHost) continue;
    Setup faster = setup;
    speed_up(faster.cluster, lane, 2);
    ZINF_ASSIGN(const StepForecast then, forecast_step(faster));
    all.push_back({.lane = lane, .gain = 1 - then.seconds / now.seconds});
  }
  std::ranges::sort(all, [](const Bound& a, const Bound& b) {
    return std::tie(b.gain, a.lane) < std::tie(a.gain, b.lane);
  });
  return all;
}

}  // namespace zinf::plan
