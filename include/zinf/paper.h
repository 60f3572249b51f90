// The tables and figures of the ZeRO and ZeRO-Infinity papers, computed with
// the formulas and the simulator of this library, beside what is printed there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zinf/status.h"

namespace zinf::plan {

// How the papers state a value.
enum class Says : std::uint8_t { kEqual, kMoreThan };

struct PaperCell {
  std::string row;
  std::string column;
  std::string printed;  // as in the paper
  double ours = 0;
  Says says = Says::kEqual;
  // Why the two differ, where they do by much.
  std::string note = {};
  bool paper_errs = false;  // the printed value contradicts the paper itself

  double paper() const;  // `printed` as a number
  // Relative to the printed value; 0 when "more than" holds.
  double error() const;
  // One unit of the last digit that is printed.
  double last_digit() const;
};

struct PaperTable {
  std::string id;  // "figure 5a"
  std::string title;
  std::string unit;
  double tolerance = 0;  // of each cell, or of the mean where it is simulated
  bool simulated = false;
  std::vector<PaperCell> cells = {};
  std::string remark = {};

  // Over the cells that are not the paper's own errors.
  double mean_error() const;
  double worst_error() const;
};

Result<std::vector<PaperTable>> paper_tables();

// Section 4: compute / (compute + movement) without overlap, at 70 TFLOPS.
double efficiency(double ops_per_byte, double bytes_per_second,
                  double flops_per_second);
// Bytes per second for which efficiency() is `wanted`.
double needed_rate(double ops_per_byte, double wanted, double flops_per_second);
// Operations per byte moved, for a batch per device: weights and gradients,
// optimizer states, activations (one input kept per `every` blocks).
double weight_intensity(double batch, double seq);
double state_intensity(double batch, double seq);
double activation_intensity(double hidden, double every = 1);

// Figure 3: efficiency over bandwidth.
struct EfficiencyCurve {
  std::string state;  // what is moved
  std::string label;  // "batch 1"
  std::vector<double> bytes_per_second;
  std::vector<double> efficiency;
};
std::vector<EfficiencyCurve> efficiency_curves();

// ZeRO: bytes per device with everything up to `stage` split over `ranks`.
double zero_bytes(double params, double ranks, int stage);

}  // namespace zinf::plan
