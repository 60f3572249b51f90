#include "zinf/step_forecast.h"

#include <algorithm>
#include <cmath>
#include <limits>
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
      cluster.fp32_peak_flops *= factor;
      return;
    case Lane::kHostToDevice:
    case Lane::kDeviceToHost:
      cluster.link_rate *= factor;
      return;
    case Lane::kNvmeRead:
      cluster.nvme_read_rate *= factor;
      cluster.nvme_rate *= factor;
      return;
    case Lane::kNvmeWrite:
      cluster.nvme_write_rate *= factor;
      cluster.nvme_rate *= factor;
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

// Note [More memory is never slower]: what is planned for less memory works
// with more, but the engine's planner, which weighs one use against another,
// may do worse with more. So a step is planned for several sizes of host
// memory, and the quickest of those that are there counts. The sizes follow
// from the states alone, from the least to all of them by whole states, so that
// more memory adds sizes and takes none away. Bytes are those of the largest
// size that is as quick but for what no forecast can tell.
constexpr double kMostSizes = 32;
constexpr double kAsQuick = 1.005;

constexpr double kAnyTime = std::numeric_limits<double>::infinity();

// See the Note.
std::optional<StepForecast> choose(const std::vector<StepForecast>& steps,
                                   double below) {
  double quickest = kAnyTime;
  for (const StepForecast& step : steps)
    quickest = std::min(quickest, step.seconds);
  if (quickest >= below) return std::nullopt;
  const auto chosen = std::ranges::find_if(steps, [&](const auto& step) {
    return step.seconds <= kAsQuick * quickest;
  });
  StepForecast step = *chosen;
  step.seconds = quickest;
  return step;
}

// Plans do not depend on rates: those of one setup serve for all.
class Forecaster {
 public:
  explicit Forecaster(const Setup& setup)
      : setup_(setup), program_(make_program(setup)) {
    find_sizes();
    plans_.resize(sizes_.size());
  }

  // With the rates of a cluster; nothing when it takes `below` or longer.
  Result<std::optional<StepForecast>> run(const Cluster& cluster,
                                          double below) {
    Setup setup = setup_;
    setup.cluster = cluster;
    const LayerCosts costs = layer_costs(setup);
    std::vector<StepForecast> steps;
    double best = below;
    const auto simulate = [&](const Plan* plan) {
      steps.push_back(simulate_step(setup_, program_, costs, plan));
      best = std::min(best, steps.back().seconds);
    };
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      if (least_seconds(sizes_[i], costs) >= best) break;
      ZINF_TRY(plan(i));
      for (const Plan& plan : *plans_[i]) simulate(&plan);
      if (plans_[i]->empty()) simulate(nullptr);
    }
    return choose(steps, below);
  }

 private:
  // Of a rank's host memory, the largest first; one where it does not matter or
  // there is less than the least.
  void find_sizes() {
    const Footprint taken = footprint(setup_);
    const double has = capacity(setup_.cluster, Tier::kHost);
    const double least = taken.on(Tier::kHost);
    double smallest = 0;
    all_ = least - moving_bytes(taken);
    const std::vector<PlanState> states = nvme_states(setup_, program_);
    for (std::uint32_t i = 0; i < states.size(); ++i) {
      const auto bytes = double(states[i].bytes);
      if (bytes == 0) continue;
      smallest = smallest == 0 ? bytes : std::min(smallest, bytes);
      all_ += bytes;
      if (i >= program_.index.grad(0)) grads_ += bytes;
    }
    if (!setup_.mechanisms.keep || has < least || all_ <= least) {
      sizes_ = {has};
      return;
    }
    const double count =
        std::min(kMostSizes, std::ceil((all_ - least) / smallest));
    const double each = (all_ - least) / count;
    for (double i = count; i >= 0; --i)
      if (least + i * each <= has) sizes_.push_back(least + i * each);
  }

  // What is not in memory between two steps is read, and was written; but for
  // gradients, which are not there then.
  double least_seconds(double host_bytes, const LayerCosts& costs) const {
    return (all_ - grads_ - host_bytes) *
           std::max(costs.read_second, costs.write_second);
  }

  Status plan(std::size_t size) {
    if (plans_[size]) return {};
    Setup setup = setup_;
    // Half a byte, so that no state is too large for it by rounding.
    setup.cluster.host_bytes =
        (sizes_[size] + 0.5) * double(setup.cluster.devices_per_node);
    ZINF_ASSIGN(plans_[size], nvme_plans(setup, program_));
    return {};
  }

  const Setup& setup_;
  const Program program_;
  std::vector<double> sizes_;
  std::vector<std::optional<std::vector<Plan>>> plans_;  // by size
  double all_ = 0;    // of host memory, with which nothing moves
  double grads_ = 0;  // of it
};

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
  ZINF_ASSIGN(const auto step, forecast_below(setup, kAnyTime));
  if (!step) return Status::error(Code::kInvalid, "a step would never end");
  return *step;
}

Result<std::optional<StepForecast>> forecast_below(const Setup& setup,
                                                   double seconds) {
  ZINF_TRY(check(setup));
  return Forecaster(setup).run(setup.cluster, seconds);
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
  ZINF_TRY(check(setup));
  Forecaster forecaster(setup);
  ZINF_ASSIGN(const auto now, forecaster.run(setup.cluster, kAnyTime));
  if (!now) return Status::error(Code::kInvalid, "a step would never end");
  std::vector<Bound> all;
  for (std::size_t i = 0; i < kLanes; ++i) {
    const auto lane = static_cast<Lane>(i);
    // One link for both ways.
    if (lane == Lane::kDeviceToHost) continue;
    Cluster faster = setup.cluster;
    speed_up(faster, lane, 2);
    ZINF_ASSIGN(const auto then, forecaster.run(faster, kAnyTime));
    if (then)
      all.push_back({.lane = lane, .gain = 1 - then->seconds / now->seconds});
  }
  std::ranges::sort(all, [](const Bound& a, const Bound& b) {
    return std::tie(b.gain, a.lane) < std::tie(a.gain, b.lane);
  });
  return all;
}

}  // namespace zinf::plan
