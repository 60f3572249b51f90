// How long one training step takes: a simulation of its events.
//
// Ranks are alike, so one is simulated, with its share of what it shares with
// others: the links and drives of its node, the network. That makes clusters of
// any size equally quick (milliseconds). What the engine decides, which states
// stay in host memory and what is read and written when, is decided by the
// engine's own planner (zinf/plan.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "zinf/setup.h"
#include "zinf/status.h"

namespace zinf::plan {

// What does one thing at a time.
enum class Lane : std::uint8_t {
  kCompute,
  kHostToDevice,
  kDeviceToHost,
  kNvmeRead,
  kNvmeWrite,
  kNodeLinks,  // between the devices of a node, when nothing leaves it
  kNetwork,    // between nodes
  kUpdate,     // by the CPU, or by a device beside its compute
};
inline constexpr std::size_t kLanes = 8;
std::string_view lane_name(Lane lane);

struct LaneForecast {
  double busy_seconds = 0;
  double bytes = 0;  // moved by a rank in a step; 0 for compute
};

struct StepForecast {
  double seconds = 0;
  // Of these, arithmetic of the model: what a step takes when nothing is moved.
  double compute_seconds = 0;
  double backward_seconds = 0;  // with what happens to gradients until updates
  std::array<LaneForecast, kLanes> lanes;

  const LaneForecast& lane(Lane lane) const {
    return lanes[static_cast<std::size_t>(lane)];
  }
  double efficiency() const { return compute_seconds / seconds; }
};

// kInvalid for a setup that makes no sense; kOverBudget when host memory does
// not hold what one moment needs. Takes no care whether all tiers suffice: see
// footprint(). Never less when a rate is lower, never more when a tier has
// more.
Result<StepForecast> forecast_step(const Setup& setup);
// The same, or nothing when the step takes `seconds` or longer, which is often
// known sooner. Its bytes are those of a plan that is at most 0.5 % slower.
Result<std::optional<StepForecast>> forecast_below(const Setup& setup,
                                                   double seconds);

// Floating-point operations of a step per device and second, as the paper
// counts them: 8 per parameter and token, or 6 without recomputation.
double model_flops_per_second(const Setup& setup, const StepForecast& step);

// What a lane twice as fast would save, as a share of the step.
struct Bound {
  Lane lane = Lane::kCompute;
  double gain = 0;
};
// All lanes, the most first.
Result<std::vector<Bound>> bounds(const Setup& setup);

}  // namespace zinf::plan
