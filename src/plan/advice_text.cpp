#include "zinf/advice_text.h"

#include "src/base/strf.h"
#include "src/plan/numbers.h"

namespace zinf::plan {
namespace {

unsigned long long count(std::uint64_t value) { return value; }
std::string name(Tier tier) { return std::string(tier_name(tier)); }
std::string name(Lane lane) { return std::string(lane_name(lane)); }

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words)
    text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::string head(const Request& request, const Advice& advice) {
  const Cluster& cluster = request.cluster;
  const ModelShape& shape = request.shape;
  return strf("%s: %s parameters, %llu layers of %llu, %llu tokens a sample\n",
              shape.name.empty() ? "model" : shape.name.c_str(),
              count_text(total_params(shape)).c_str(), count(shape.layers),
              count(shape.hidden), count(shape.seq)) +
         strf(
             "on %s: %llu %s of %llu %s; %s sample%s per device and step in "
             "%llu micro-batch%s, %s%s\n\n",
             cluster.name.c_str(), count(cluster.nodes),
             cluster.nodes == 1 ? "node" : "nodes",
             count(cluster.devices_per_node),
             cluster.devices_per_node == 1 ? "device" : "devices",
             number_text(request.batch).c_str(), request.batch == 1 ? "" : "s",
             count(advice.setup.micro_batches),
             advice.setup.micro_batches == 1 ? "" : "es",
             request.precision.c_str(),
             request.recompute ? ", activations recomputed" : "");
}

std::string tiers(const Advice& advice) {
  std::string text =
      strf("\n    %-40s %10s %12s %12s\n", "", "taken", "there is", "least");
  for (std::size_t i = 0; i < kTiers.size(); ++i) {
    const double has = capacity(advice.setup.cluster, kTiers[i]);
    const double taken = advice.footprint.on(kTiers[i]);
    if (has <= 0 && taken <= 0) continue;
    text +=
        strf("    %-40s %10s %12s %12s\n", name(kTiers[i]).c_str(),
             bytes_text(taken).c_str(), bytes_text(has).c_str(),
             (advice.least[i] ? bytes_up_text(*advice.least[i]) : "-").c_str());
  }
  return text;
}

std::string memory(const Advice& advice) {
  std::string text = "  per process\n";
  for (const Taken& one : advice.footprint.taken) {
    if (one.bytes <= 0) continue;
    text += strf("    %-40s %-7s %10s\n", one.what.c_str(),
                 name(one.tier).c_str(), bytes_text(one.bytes).c_str());
  }
  text += tiers(advice);
  if (advice.kept_bytes > 0) {
    text +=
        strf("    host memory that is left keeps %s of what lives on NVMe\n",
             bytes_text(advice.kept_bytes).c_str());
  }
  return text;
}

std::string bound(const Advice& advice) {
  std::string text =
      strf("  %.1f%% of what compute alone would reach; bound by %s",
           100 * advice.step.efficiency(), name(advice.bounds[0].lane).c_str());
  for (const Bound& one : advice.bounds) {
    if (one.gain < 0.01) break;
    text += strf("%s%s twice as fast would save %.0f%%",
                 &one == advice.bounds.data() ? " (" : ", ",
                 name(one.lane).c_str(), 100 * one.gain);
  }
  return text + (advice.bounds[0].gain < 0.01 ? "\n" : ")\n");
}

std::string lanes(const Advice& advice) {
  const double params =
      total_params(advice.setup.shape) / double(advice.setup.cluster.devices());
  std::string text =
      strf("\n    %-22s %12s %18s\n", "lane", "busy", "bytes/parameter");
  for (std::size_t i = 0; i < kLanes; ++i) {
    const LaneForecast& lane = advice.step.lanes[i];
    if (lane.busy_seconds <= 0) continue;
    const std::string each =
        lane.bytes > 0 ? strf("%.2f", lane.bytes / params) : "-";
    text +=
        strf("    %-22s %11.1f%% %18s\n", name(static_cast<Lane>(i)).c_str(),
             100 * lane.busy_seconds / advice.step.seconds, each.c_str());
  }
  return text;
}

std::string speed(const Request& request, const Advice& advice) {
  std::string text =
      strf("\n  a step takes %s: %s tokens/s, %s TFLOPS per device\n",
           time_text(advice.step.seconds).c_str(),
           number_text(advice.tokens_per_second).c_str(),
           number_text(model_flops_per_second(advice.setup, advice.step) / 1e12)
               .c_str());
  text += bound(advice) + lanes(advice);
  if (advice.written_per_drive_day > 0) {
    text += strf("\n  written to each drive (a node has %llu): %s TB a day\n",
                 count(request.cluster.drives),
                 number_text(advice.written_per_drive_day / 1e12).c_str());
  }
  if (request.tokens > 0) {
    text +=
        strf("  %s tokens take %s%s\n", count_text(request.tokens).c_str(),
             time_text(advice.seconds_to_tokens).c_str(),
             advice.cost ? (" and cost " + number_text(*advice.cost)).c_str()
                         : " (--price gives the cost)");
  }
  if (!advice.projected.empty()) {
    text += strf("  projected, the engine does not do it yet: %s\n",
                 joined(advice.projected).c_str());
  }
  return text;
}

std::string shortages(const Advice& advice) {
  std::string text = "\n  it does not fit\n";
  for (const Shortage& one : advice.shortages) {
    text += strf("    %s: %s are needed, %s are there, %s are missing\n",
                 name(one.tier).c_str(), bytes_text(one.needs).c_str(),
                 bytes_text(one.has).c_str(),
                 bytes_text(one.needs - one.has).c_str());
  }
  if (advice.helps.empty()) {
    return text +
           "  no single change would help, up to 16 times what there is\n";
  }
  text += "  each of these would help, the least first\n";
  for (const std::string& help : advice.helps) text += "    " + help + "\n";
  return text;
}

std::string row(const Varied& varied) {
  const Advice& advice = varied.advice;
  const std::string what = strf(
      "%-28s ", (varied.variation.name + "=" + varied.variation.value).c_str());
  if (!advice.fits()) {
    const Shortage& first = advice.shortages[0];
    return what + strf("does not fit: %s of %s missing\n",
                       bytes_text(first.needs - first.has).c_str(),
                       name(first.tier).c_str());
  }
  const Placement& at = advice.setup.placement;
  return what + strf("%-9s %-9s %-12s %10s %12s %10.1f%%  %s\n",
                     name(at.weights).c_str(), name(at.states).c_str(),
                     name(at.activations).c_str(),
                     time_text(advice.step.seconds).c_str(),
                     number_text(advice.tokens_per_second).c_str(),
                     100 * advice.step.efficiency(),
                     name(advice.bounds[0].lane).c_str());
}

}  // namespace

std::string text_of(const Request& request, const Advice& advice) {
  return head(request, advice) + memory(advice) +
         (advice.fits() ? speed(request, advice) : shortages(advice));
}

std::string text_of(const std::vector<Varied>& sweep) {
  std::string text = strf("%-28s %-9s %-9s %-12s %10s %12s %11s  %s\n",
                          "what if", "weights", "states", "activations", "step",
                          "tokens/s", "efficiency", "bound by");
  for (const Varied& one : sweep) text += row(one);
  return text;
}

}  // namespace zinf::plan
