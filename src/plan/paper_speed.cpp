// How fast: figures 5a to 5c and 6c to 6e, simulated.
#include <array>

#include "src/base/strf.h"
#include "src/plan/paper_parts.h"
#include "zinf/step_forecast.h"

namespace zinf::plan {
namespace {

constexpr double kMeanTolerance = 0.12;

constexpr Placement kOnNvme = {
    .weights = Tier::kNvme, .grads = Tier::kNvme, .states = Tier::kNvme};
// Gradients stay where the host has room for them.
constexpr Placement kOnHostAndNvme = {
    .weights = Tier::kHost, .grads = Tier::kHost, .states = Tier::kNvme};
constexpr Placement kStatesOnHost = {.grads = Tier::kHost,
                                     .states = Tier::kHost};

PaperTable simulated(const char* id, const char* title, const char* unit) {
  return {.id = id,
          .title = title,
          .unit = unit,
          .tolerance = kMeanTolerance,
          .simulated = true};
}

Result<double> teraflops(const Setup& setup) {
  ZINF_ASSIGN(const StepForecast step, forecast_step(setup));
  return model_flops_per_second(setup, step) / 1e12;
}

// 3D parallelism: nothing is gathered, nothing leaves the devices. Its pipeline
// is not simulated.
Setup three_d(Setup setup) {
  setup.stage = 0;
  setup.placement = {};
  setup.model_parallel = 4;
  return setup;
}

// ZeRO-Offload: weights on every device, a gradient and its update with one
// owner.
Setup offload(Setup setup) {
  setup.stage = 2;
  setup.placement = kStatesOnHost;
  setup.mechanisms.owners = true;
  return setup;
}

// A row of the paper's table 1.
struct Run {
  const char* name;
  const char* printed;
  std::uint64_t nodes;
  std::uint64_t layers;
  std::uint64_t hidden;
  double batch;
  std::uint64_t model_parallel;
  Placement placement;
};

Setup set_up(const Run& run) {
  Setup setup = paper_setup(paper_model(run.name, run.layers, run.hidden),
                            dgx2(run.nodes), run.batch, run.model_parallel);
  setup.placement = run.placement;
  settle_activations(setup);
  return setup;
}

Status add(PaperTable& table, const char* row, const char* column,
           const char* printed, const Result<double>& ours) {
  if (!ours.ok()) return ours.status().in(table.id + ", " + row);
  table.cells.push_back({row, column, printed, ours.value()});
  return {};
}

constexpr const char* kInfinity = "ZeRO-Infinity";

// Why a cell is off.
void explain(PaperTable& table, const std::string& row,
             const std::string& column, const char* note) {
  for (PaperCell& cell : table.cells)
    if (cell.row == row && cell.column == column) cell.note = note;
}

// The 8B model of figures 6c and 6d.
Setup eight_billion(const Cluster& cluster, double batch) {
  Setup setup = paper_setup(paper_model("8B", 10, 8192), cluster, batch);
  setup.placement = kStatesOnHost;
  return setup;
}

}  // namespace

Result<PaperTable> figure_5a() {
  PaperTable table =
      simulated("figure 5a", "throughput on 512 V100s", "TFLOPS per device");
  static constexpr std::array<Run, 5> kRuns = {
      {{"0.5T", "46", 32, 124, 18432, 7, 4, {}},
       {"1T", "49", 32, 128, 25600, 5, 4, {}},
       {"5T", "44", 32, 174, 49152, 3, 4, kOnNvme},
       {"10T", "43", 32, 200, 65536, 2, 4, kOnNvme},
       {"20T", "34", 32, 205, 90112, 1.25, 8, kOnNvme}}};
  for (const Run& run : kRuns)
    ZINF_TRY(
        add(table, run.name, kInfinity, run.printed, teraflops(set_up(run))));
  ZINF_TRY(add(table, "0.5T", "3D parallelism", "47",
               teraflops(three_d(set_up(kRuns[0])))));
  table.remark =
      "Placement, batch and model parallelism are those of the paper's table "
      "1. It puts 1T on devices of 32 GB, which at the 20 bytes per parameter "
      "of its section 3 would need 39: ours follows table 1.";
  explain(table, "20T", kInfinity,
          "the paper's slides draw this bar at 37; the paper blames the small "
          "batch, with which the network moves for more than half of the "
          "compute's time, and ours hides all of it but the sums of gradients");
  return table;
}

Result<PaperTable> figure_5b() {
  PaperTable table =
      simulated("figure 5b", "1T from 64 to 512 V100s", "PFLOPS in all");
  struct Row {
    std::uint64_t nodes;
    const char* printed;
  };
  for (const Row& row :
       {Row{4, "2.81"}, Row{8, "6.24"}, Row{16, "11.85"}, Row{32, "25.1"}}) {
    Setup setup = set_up({"1T", "", row.nodes, 128, 25600, 5, 4, {}});
    const double devices = double(setup.cluster.devices());
    if (row.nodes < 32) settle_states(setup);
    ZINF_ASSIGN(const double each, teraflops(setup));
    const std::string name = strf("%.0f devices", devices);
    ZINF_TRY(add(table, name.c_str(), kInfinity, row.printed,
                 Result<double>(each * devices / 1e3)));
  }
  table.remark =
      "5 samples per device. Weights and states are on the first tier that "
      "holds them, with 512 devices as in table 1: they leave NVMe for the "
      "host between 128 and 256, which is why it scales better than linearly.";
  return table;
}

Result<PaperTable> figure_5c() {
  PaperTable table =
      simulated("figure 5c", "throughput on one DGX-2", "TFLOPS per device");
  static constexpr std::array<Run, 5> kRuns = {
      {{"10B", "45", 1, 50, 4096, 8, 1, {}},
       {"50B", "44", 1, 62, 8192, 26, 1, kOnHostAndNvme},
       {"100B", "41", 1, 125, 8192, 24, 1, kOnHostAndNvme},
       {"0.5T", "33", 1, 124, 18432, 8, 1, kOnNvme},
       {"1T", "27", 1, 128, 25600, 7, 1, kOnNvme}}};
  for (const Run& run : kRuns)
    ZINF_TRY(
        add(table, run.name, kInfinity, run.printed, teraflops(set_up(run))));
  ZINF_TRY(add(table, "10B", "ZeRO-Offload", "35",
               teraflops(offload(set_up(kRuns[0])))));
  ZINF_TRY(add(table, "10B", "3D parallelism", "48",
               teraflops(three_d(set_up(kRuns[0])))));
  return table;
}

Result<PaperTable> figure_6c() {
  PaperTable table = simulated(
      "figure 6c", "backward of an 8B model, gradients to the host", "seconds");
  struct Row {
    Cluster cluster;
    const char* infinity;
    const char* offload;
  };
  for (const Row& row :
       {Row{part_of_dgx2(4), "5.9", "5.67"}, Row{dgx2(1), "3.16", "4.67"},
        Row{dgx2(2), "2.61", "4.60"}, Row{dgx2(4), "2.42", "4.52"}}) {
    const Setup setup = eight_billion(row.cluster, 2);
    const std::string name =
        strf("%.0f devices", double(row.cluster.devices()));
    ZINF_ASSIGN(const StepForecast ours, forecast_step(setup));
    ZINF_ASSIGN(const StepForecast theirs, forecast_step(offload(setup)));
    ZINF_TRY(add(table, name.c_str(), kInfinity, row.infinity,
                 Result<double>(ours.backward_seconds)));
    ZINF_TRY(add(table, name.c_str(), "ZeRO-Offload", row.offload,
                 Result<double>(theirs.backward_seconds)));
  }
  explain(table, "4 devices", kInfinity,
          "this point is hidden behind the other line's marker: read as about "
          "5.9");
  explain(table, "4 devices", "ZeRO-Offload",
          "unexplained: one owner at a time moves the same bytes through the "
          "same kind of link as with 16 devices, for which the paper has 4.67");
  return table;
}

Result<PaperTable> figure_6d() {
  PaperTable table = simulated(
      "figure 6d", "prefetch and overlap, 8B on 64 V100s", "times as fast");
  struct Row {
    double batch;
    const char* printed;
  };
  for (const Row& row : {Row{2, "1.29"}, Row{4, "1.19"}, Row{8, "1.09"},
                         Row{10, "1.05"}, Row{14, "1.01"}, Row{16, "1.02"}}) {
    Setup setup = eight_billion(dgx2(4), row.batch);
    settle_activations(setup);
    ZINF_ASSIGN(const StepForecast with, forecast_step(setup));
    setup.mechanisms.overlap = false;
    ZINF_ASSIGN(const StepForecast without, forecast_step(setup));
    const std::string name = strf("batch %.0f", row.batch);
    ZINF_TRY(add(table, name.c_str(), kInfinity, row.printed,
                 Result<double>(without.seconds / with.seconds)));
  }
  table.remark =
      "Errors are of the ratio. Of the gain alone ours is about half of the "
      "paper's at small batches: the sums of gradients are not hidden in ours, "
      "because the copies that wait for them are not (figure 6c).";
  return table;
}

Result<PaperTable> figure_6e() {
  PaperTable table =
      simulated("figure 6e", "activations on the host", "times as long");
  struct Row {
    std::uint64_t hidden_k;
    std::uint64_t nodes;
    Placement placement;
    const char* printed;
  };
  constexpr Placement kStatesOnNvme = {.grads = Tier::kHost,
                                       .states = Tier::kNvme};
  for (const Row& row :
       {Row{2, 2, kStatesOnHost, "1.21"}, Row{8, 2, kStatesOnHost, "1.22"},
        Row{16, 2, kStatesOnHost, "1.19"}, Row{32, 2, kStatesOnHost, "1.05"},
        Row{64, 4, kStatesOnNvme, "1.02"}}) {
    const std::string name = strf("hidden %dK", static_cast<int>(row.hidden_k));
    Setup setup = paper_setup(paper_model(name, 5, row.hidden_k * 1024),
                              dgx2(row.nodes), 4);
    setup.placement = row.placement;
    ZINF_ASSIGN(const StepForecast without, forecast_step(setup));
    setup.placement.activations = Tier::kHost;
    ZINF_ASSIGN(const StepForecast with, forecast_step(setup));
    ZINF_TRY(add(table, name.c_str(), kInfinity, row.printed,
                 Result<double>(with.seconds / without.seconds)));
  }
  table.remark =
      "Errors are of the ratio. Of the loss alone ours is far less at hidden "
      "sizes of 8K and 16K, 6 and 3 % against 22 and 19: by its bytes at 3 "
      "GB/s "
      "the loss must fall as the hidden size grows, which the paper's does not "
      "do between 2K and 16K.";
  return table;
}

}  // namespace zinf::plan
