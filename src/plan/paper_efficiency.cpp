// Sections 4 and 9: how much bandwidth is needed.
#include <utility>

#include "src/base/strf.h"
#include "src/plan/constants.h"
#include "src/plan/paper_parts.h"

namespace zinf::plan {
namespace {

constexpr double kSeq = 1024;

double percent(double intensity, double rate) {
  return 100 * efficiency(intensity, rate, kProductFlops);
}

}  // namespace

double efficiency(double ops_per_byte, double bytes_per_second,
                  double flops_per_second) {
  const double fed = ops_per_byte * bytes_per_second;
  return fed / (fed + flops_per_second);
}

double needed_rate(double ops_per_byte, double wanted,
                   double flops_per_second) {
  return wanted / (1 - wanted) * flops_per_second / ops_per_byte;
}

// 8 operations per parameter and token, over: three loads and a store of 2
// bytes; 16 bytes read and written; 2 bytes per element written and read, of
// blocks with 12 hidden^2 parameters.
double weight_intensity(double batch, double seq) {
  return 8 * batch * seq / (4 * 2);
}
double state_intensity(double batch, double seq) {
  return 8 * batch * seq / (2 * 16);
}
double activation_intensity(double hidden, double every) {
  return 8 * 12 * hidden * hidden * every / (4 * hidden);
}

PaperTable figure_3() {
  PaperTable table{.id = "figure 3",
                   .title = "efficiency without overlap at 70 TFLOPS",
                   .unit = "%",
                   .tolerance = 0.02};
  const auto add = [&](const char* row, const char* column, const char* printed,
                       double ours, Says says = Says::kEqual) {
    table.cells.push_back({row, column, printed, ours, says});
  };
  add("weights and gradients", "70 GB/s, batch 1", "50",
      percent(weight_intensity(1, kSeq), 70e9));
  add("optimizer states", "4 x 70 GB/s, batch 1", "50",
      percent(state_intensity(1, kSeq), 4 * 70e9));
  add("optimizer states", "1.5 TB/s, batch 2", "90",
      percent(state_intensity(2, kSeq), 1.5e12));
  add("activations", "2 GB/s, hidden 2K", "50",
      percent(activation_intensity(2 * kKiB), 2e9), Says::kMoreThan);
  add("activations", "1 GB/s, hidden 8K", "50",
      percent(activation_intensity(8 * kKiB), 1e9), Says::kMoreThan);
  add("activations", "3 GB/s, hidden 8K", "80",
      percent(activation_intensity(8 * kKiB), 3e9), Says::kMoreThan);
  table.remark =
      "The paper prints curves and these conclusions. 1.5 TB/s is its round "
      "figure for 90 %: the formula asks for 1.23 TB/s.";
  return table;
}

std::vector<EfficiencyCurve> efficiency_curves() {
  std::vector<EfficiencyCurve> curves;
  const auto add = [&](const char* state, const std::string& label,
                       double intensity, double least_rate) {
    EfficiencyCurve curve{state, label, {}, {}};
    for (double rate = least_rate; rate < 1000 * least_rate; rate *= 1.2) {
      curve.bytes_per_second.push_back(rate);
      curve.efficiency.push_back(efficiency(intensity, rate, kProductFlops));
    }
    curves.push_back(std::move(curve));
  };
  for (const double batch : {1.0, 2.0, 4.0, 8.0, 16.0}) {
    const std::string label = strf("batch %.0f", batch);
    add("weights and gradients", label, weight_intensity(batch, kSeq), 1e9);
    add("optimizer states", label, state_intensity(batch, kSeq), 10e9);
  }
  for (const double hidden_k : {2.0, 8.0, 16.0, 32.0, 64.0}) {
    add("activations", strf("hidden %.0fK", hidden_k),
        activation_intensity(hidden_k * kKiB), 0.1e9);
  }
  return curves;
}

// What keeps the V100's efficiency on devices that compute 10 and 100 times as
// fast: the needs of section 4, with all rates in proportion.
PaperTable table_3() {
  PaperTable table{.id = "table 3",
                   .title = "future hardware, 512 devices",
                   .unit = "GB/s, TB/s",
                   .tolerance = 0.03};
  struct Column {
    double faster;
    const char* name;
    const char* slow;
    const char* aggregate;
    const char* between;
  };
  constexpr double kStates = 1.5e12;  // section 4, for the optimizer states
  for (const Column& column : {Column{1, "V100", "3", "1.5", "70"},
                               Column{10, "10x", "30", "15", "700"},
                               Column{100, "100x", "300", "150", "7000"}}) {
    const double flops = column.faster * kProductFlops;
    const double states = needed_rate(
        state_intensity(2, kSeq),
        efficiency(state_intensity(2, kSeq), kStates, kProductFlops), flops);
    const double between = needed_rate(weight_intensity(1, kSeq), 0.5, flops);
    table.cells.push_back({"slow memory per device, GB/s", column.name,
                           column.slow, states / 512 / 1e9});
    table.cells.push_back({"slow memory in all, TB/s", column.name,
                           column.aggregate, states / 1e12});
    table.cells.push_back(
        {"between devices, GB/s", column.name, column.between, between / 1e9});
  }
  table.remark =
      "Ours: what 50 % at batch 1 asks of the network, and what the "
      "efficiency of 1.5 TB/s at batch 2 asks of the slow memory.";
  return table;
}

}  // namespace zinf::plan
