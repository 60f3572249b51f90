#include "zinf/beyond.h"

#include "src/base/strf.h"
#include "src/plan/constants.h"
#include "src/plan/paper_parts.h"
#include "zinf/step_forecast.h"

namespace zinf::plan {
namespace {

constexpr Placement kAllOnNvme = {.weights = Tier::kNvme,
                                  .grads = Tier::kHost,
                                  .states = Tier::kNvme,
                                  .activations = Tier::kNvme};

Setup zinf_setup(const ModelShape& shape, const Cluster& cluster,
                 double batch) {
  Setup setup = paper_setup(shape, cluster, batch);
  setup.precision = zinf_precision("bf16-split").value();
  setup.mechanisms = zinf_mechanisms();
  return setup;
}

std::string short_number(double value) {
  return strf(value < 1 ? "%.2f" : value < 10 ? "%.1f" : "%.0f", value);
}

// The paper's 20T: 205 layers of 88K.
Result<TextTable> twenty_trillion() {
  TextTable table{
      .title = "20T on 512 V100s",
      .header = {"engine", "activations", "batch/device", "host/process",
                 "NVMe/process", "TFLOPS/device", "efficiency"},
      .rows = {},
      .remark =
          "The paper's batch is what host memory holds of activations. With "
          "them on NVMe the batch is free. Operators in 16 tiles, no model "
          "parallelism, split masters. Projected: activations on NVMe, tiles, "
          "devices."};
  const auto add = [&](const char* engine, const Setup& setup) -> Status {
    ZINF_ASSIGN(const StepForecast step, forecast_step(setup));
    const Footprint taken = footprint(setup);
    table.rows.push_back(
        {engine, std::string(tier_name(setup.placement.activations)),
         strf("%g", setup.batch), strf("%.0f GB", taken.on(Tier::kHost) / 1e9),
         strf("%.0f GB", taken.on(Tier::kNvme) / 1e9),
         strf("%.1f", model_flops_per_second(setup, step) / 1e12),
         strf("%.0f%%", 100 * step.efficiency())});
    return {};
  };
  const ModelShape shape = paper_model("20T", 205, 90112);
  Setup paper = paper_setup(shape, dgx2(32), 1.25, 8);
  paper.placement = {.weights = Tier::kNvme,
                     .grads = Tier::kNvme,
                     .states = Tier::kNvme,
                     .activations = Tier::kHost};
  ZINF_TRY(add("paper's", paper));
  for (const double batch : {1.25, 2.0, 4.0, 8.0}) {
    Setup setup = zinf_setup(shape, dgx2(32), batch);
    setup.placement = kAllOnNvme;
    setup.mechanisms.tiles = 16;
    if (batch < 2) {
      setup.placement.activations = Tier::kHost;
      ZINF_TRY(add("zinf's", setup));
      setup.placement.activations = Tier::kNvme;
    }
    ZINF_TRY(add("zinf's", setup));
  }
  return table;
}

// 1T: what tokens take on few and on many nodes.
Result<TextTable> pretraining() {
  TextTable table{
      .title = "1T on DGX-2 nodes: fine-tuning and pretraining",
      .header = {"nodes", "devices", "states on", "tokens/s",
                 "100 M tokens (days)", "300 G tokens (years)",
                 "device-years of pretraining"},
      .rows = {},
      .remark =
          "5 samples of 1024 tokens per device and step. Fine-tuning on 100 "
          "million tokens takes one node; pretraining on 300 billion takes "
          "device-years whatever the memory: what fits is not what is "
          "affordable. Projected: devices."};
  const ModelShape shape = paper_model("1T", 128, 25600);
  for (const std::uint64_t nodes : {1, 4, 32, 128, 1024}) {
    Setup setup = zinf_setup(shape, dgx2(nodes), 5);
    setup.mechanisms.tiles = 8;
    settle_states(setup);
    ZINF_ASSIGN(const StepForecast step, forecast_step(setup));
    const double devices = double(setup.cluster.devices());
    const double rate = tokens_per_rank(setup) * devices / step.seconds;
    constexpr double kYear = 365.25 * 86400;
    table.rows.push_back(
        {strf("%d", static_cast<int>(nodes)), strf("%.0f", devices),
         std::string(tier_name(setup.placement.states)), strf("%.0f", rate),
         short_number(100e6 / rate / 86400), short_number(300e9 / rate / kYear),
         strf("%.0f", 300e9 / rate / kYear * devices)});
  }
  return table;
}

// A model that fits many times: everything split over all, or over a node.
Result<TextTable> small_batches() {
  TextTable table{
      .title = "10B on 32 DGX-2 nodes: small batches",
      .header = {"tokens/device", "split over all", "its bound",
                 "split over a node", "its bound", "device/process (node)"},
      .rows = {},
      .remark =
          "TFLOPS per device. Split over all, every step gathers all weights "
          "through the network twice; split over a node, only sums of "
          "gradients leave it, for 32 times the memory of states."};
  for (const double batch : {0.25, 0.5, 1.0, 2.0, 4.0, 8.0}) {
    std::vector<std::string> row = {strf("%.0f", 1024 * batch)};
    Setup setup = zinf_setup(paper_model("10B", 50, 4096), dgx2(32), batch);
    for (const bool groups : {false, true}) {
      setup.mechanisms.node_groups = groups;
      ZINF_ASSIGN(const StepForecast step, forecast_step(setup));
      ZINF_ASSIGN(const std::vector<Bound> bound, bounds(setup));
      row.push_back(strf("%.1f", model_flops_per_second(setup, step) / 1e12));
      row.emplace_back(lane_name(bound[0].lane));
    }
    row.push_back(strf("%.1f GB", footprint(setup).on(Tier::kDevice) / 1e9));
    table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace

Result<std::vector<TextTable>> beyond_tables() {
  std::vector<TextTable> tables;
  for (const auto& make :
       {twenty_trillion, pretraining, small_batches, interactions}) {
    ZINF_ASSIGN(TextTable table, make());
    tables.push_back(std::move(table));
  }
  return tables;
}

}  // namespace zinf::plan
