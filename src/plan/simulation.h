// The simulation behind forecast_step().
#pragma once

#include "src/plan/layer_costs.h"
#include "src/plan/program.h"
#include "zinf/step_forecast.h"

namespace zinf::plan {

// `plan` is null when nothing is on NVMe but perhaps activations. Everything
// was checked.
StepForecast simulate_step(const Setup& setup, const Program& program,
                           const LayerCosts& costs, const Plan* plan);

}  // namespace zinf::plan
