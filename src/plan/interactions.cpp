// Which mechanisms help each other, and which save the same time twice.
#include <array>

#include "src/base/strf.h"
#include "src/plan/paper_parts.h"
#include "zinf/beyond.h"
#include "zinf/step_forecast.h"

namespace zinf::plan {
namespace {

struct Mechanism {
  const char* name;
  bool projected;  // the engine does not have it yet
  void (*turn_on)(Setup&);
};

constexpr std::array<Mechanism, 7> kMechanisms = {{
    {"overlap", false, [](Setup& s) { s.mechanisms.overlap = true; }},
    {"gradients behind", false,
     [](Setup& s) { s.mechanisms.overlap_grads = true; }},
    {"activations behind", true,
     [](Setup& s) { s.mechanisms.overlap_activations = true; }},
    {"update in backward", false,
     [](Setup& s) {
       s.mechanisms.update_in_backward = true;
       s.precision.kept_grad = 2;
       s.placement.grads = Tier::kHost;
     }},
    {"kept in host", false, [](Setup& s) { s.mechanisms.keep = true; }},
    {"split master", false, [](Setup& s) { s.precision.states = 10; }},
    {"vertical", true, [](Setup& s) { s.mechanisms.vertical = true; }},
}};

// 100B on one DGX-2, everything on NVMe but activations, in 4 micro-batches,
// with no mechanism at all.
Setup bare() {
  Setup setup = paper_setup(paper_model("100B", 125, 8192), dgx2(1), 8);
  setup.micro_batches = 4;
  setup.placement = {.weights = Tier::kNvme,
                     .grads = Tier::kNvme,
                     .states = Tier::kNvme,
                     .activations = Tier::kHost};
  setup.mechanisms = {.overlap = false};
  return setup;
}

}  // namespace

Result<TextTable> interactions() {
  TextTable table{
      .title = "Mechanisms alone, in pairs and together: 100B on one DGX-2",
      .header = {"times as fast as with none"},
      .rows = {},
      .remark = {}};
  for (const Mechanism& one : kMechanisms)
    table.header.push_back(std::string(one.name) +
                           (one.projected ? " (projected)" : ""));
  ZINF_ASSIGN(const StepForecast none, forecast_step(bare()));
  Setup all = bare();
  for (const Mechanism& row : kMechanisms) {
    row.turn_on(all);
    std::vector<std::string> cells = {row.name};
    for (const Mechanism& column : kMechanisms) {
      Setup setup = bare();
      row.turn_on(setup);
      column.turn_on(setup);
      ZINF_ASSIGN(const StepForecast step, forecast_step(setup));
      cells.push_back(strf("%.2f", none.seconds / step.seconds));
    }
    table.rows.push_back(std::move(cells));
  }
  ZINF_ASSIGN(const StepForecast every, forecast_step(all));
  table.remark = strf(
      "On the diagonal: alone. All together: %.2f times as fast, %.0f %% of "
      "compute alone, against %.0f %% with none. Everything on NVMe but "
      "activations, which are on the host; 8 samples per device in 4 "
      "micro-batches.",
      none.seconds / every.seconds, 100 * every.efficiency(),
      100 * none.efficiency());
  return table;
}

}  // namespace zinf::plan
