#include "cli/plan_print.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "src/base/strf.h"
#include "zinf/bytes.h"

namespace zinf::cli {
namespace {

using plan::Advice;
using plan::Lane;
using plan::Request;
using plan::Tier;

constexpr std::array kTiers = {Tier::kDevice, Tier::kHost, Tier::kNvme};

std::string bytes_text(double bytes) {
  return format_bytes(static_cast<std::uint64_t>(std::max(bytes, 0.0)));
}

// "8.03 billion"
std::string count_text(double count) {
  if (count >= 1e12) return strf("%.3g trillion", count / 1e12);
  if (count >= 1e9) return strf("%.3g billion", count / 1e9);
  if (count >= 1e6) return strf("%.3g million", count / 1e6);
  return strf("%.0f", count);
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return strf("%.3g us", seconds * 1e6);
  if (seconds < 1) return strf("%.3g ms", seconds * 1e3);
  if (seconds < 600) return strf("%.3g s", seconds);
  if (seconds < 7200) return strf("%.3g minutes", seconds / 60);
  if (seconds < 86400) return strf("%.3g hours", seconds / 3600);
  return strf("%.3g days", seconds / 86400);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words)
    text += (text.empty() ? "" : ", ") + word;
  return text;
}

void print_head(const Request& request, const Advice& advice) {
  const plan::Cluster& cluster = request.cluster;
  std::printf("%s: %s parameters, %llu layers of %llu, %llu tokens a sample\n",
              request.shape.name.empty() ? "model" : request.shape.name.c_str(),
              count_text(total_params(request.shape)).c_str(),
              static_cast<unsigned long long>(request.shape.layers),
              static_cast<unsigned long long>(request.shape.hidden),
              static_cast<unsigned long long>(request.shape.seq));
  std::printf(
      "on %s: %llu %s of %llu %s; %g sample%s per device and step in %llu "
      "micro-batch%s, %s%s\n\n",
      cluster.name.c_str(), static_cast<unsigned long long>(cluster.nodes),
      cluster.nodes == 1 ? "node" : "nodes",
      static_cast<unsigned long long>(cluster.devices_per_node),
      cluster.devices_per_node == 1 ? "device" : "devices", request.batch,
      request.batch == 1 ? "" : "s",
      static_cast<unsigned long long>(advice.setup.micro_batches),
      advice.setup.micro_batches == 1 ? "" : "es", request.precision.c_str(),
      request.recompute ? ", activations recomputed" : "");
}

void print_memory(const Advice& advice) {
  std::printf("  per process\n");
  for (const plan::Taken& one : advice.footprint.taken) {
    if (one.bytes <= 0) continue;
    std::printf("    %-40s %-7s %10s\n", one.what.c_str(),
                std::string(tier_name(one.tier)).c_str(),
                bytes_text(one.bytes).c_str());
  }
  std::printf("\n    %-40s %10s %12s %12s\n", "", "taken", "there is", "least");
  const std::array<double, 3> least = {advice.least.device, advice.least.host,
                                       advice.least.nvme};
  for (std::size_t i = 0; i < kTiers.size(); ++i) {
    const double has = capacity(advice.setup.cluster, kTiers[i]);
    const double taken = advice.footprint.on(kTiers[i]);
    if (has <= 0 && taken <= 0) continue;
    std::printf("    %-40s %10s %12s %12s\n",
                std::string(tier_name(kTiers[i])).c_str(),
                bytes_text(taken).c_str(), bytes_text(has).c_str(),
                bytes_text(least[i]).c_str());
  }
  if (advice.kept_bytes > 0) {
    std::printf("    host memory that is left keeps %s of what lives on NVMe\n",
                bytes_text(advice.kept_bytes).c_str());
  }
}

void print_lanes(const Advice& advice) {
  const double params =
      total_params(advice.setup.shape) / double(advice.setup.cluster.devices());
  std::printf("\n    %-22s %12s %18s\n", "lane", "busy", "bytes/parameter");
  for (std::size_t i = 0; i < plan::kLanes; ++i) {
    const plan::LaneForecast& lane = advice.step.lanes[i];
    if (lane.busy_seconds <= 0) continue;
    const std::string each =
        lane.bytes > 0 ? strf("%.2f", lane.bytes / params) : "-";
    std::printf("    %-22s %11.1f%% %18s\n",
                std::string(lane_name(static_cast<Lane>(i))).c_str(),
                100 * lane.busy_seconds / advice.step.seconds, each.c_str());
  }
}

void print_speed(const Request& request, const Advice& advice) {
  std::printf("\n  a step takes %s: %.4g tokens/s, %.1f TFLOPS per device\n",
              time_text(advice.step.seconds).c_str(), advice.tokens_per_second,
              model_flops_per_second(advice.setup, advice.step) / 1e12);
  std::printf("  %.1f%% of what compute alone would reach; bound by %s",
              100 * advice.step.efficiency(),
              std::string(lane_name(advice.bounds[0].lane)).c_str());
  for (const plan::Bound& bound : advice.bounds) {
    if (bound.gain < 0.01) break;
    std::printf("%s%s twice as fast would save %.0f%%",
                &bound == advice.bounds.data() ? " (" : ", ",
                std::string(lane_name(bound.lane)).c_str(), 100 * bound.gain);
  }
  std::printf("%s\n", advice.bounds[0].gain < 0.01 ? "" : ")");
  print_lanes(advice);
  if (advice.written_per_drive_day > 0) {
    std::printf("\n  written to each drive (a node has %llu): %.3g TB a day\n",
                static_cast<unsigned long long>(request.cluster.drives),
                advice.written_per_drive_day / 1e12);
  }
  if (request.tokens > 0) {
    std::printf("  %s tokens take %s%s\n", count_text(request.tokens).c_str(),
                time_text(advice.seconds_to_tokens).c_str(),
                advice.cost ? strf(" and cost %.4g", *advice.cost).c_str()
                            : " (--price gives the cost)");
  }
}

void print_shortages(const Advice& advice) {
  std::printf("\n  it does not fit\n");
  for (const plan::Shortage& one : advice.shortages) {
    std::printf("    %s: %s are needed, %s are there, %s are missing\n",
                std::string(tier_name(one.tier)).c_str(),
                bytes_text(one.needs).c_str(), bytes_text(one.has).c_str(),
                bytes_text(one.needs - one.has).c_str());
  }
  if (advice.helps.empty()) {
    std::printf("  no single change would help\n");
    return;
  }
  std::printf("  each of these would help, the least first\n");
  for (const std::string& help : advice.helps)
    std::printf("    %s\n", help.c_str());
}

std::vector<JsonObject> json_lanes(const Advice& advice) {
  std::vector<JsonObject> lanes;
  lanes.reserve(plan::kLanes);
  for (std::size_t i = 0; i < plan::kLanes; ++i) {
    lanes.push_back(JsonObject()
                        .add("lane", lane_name(static_cast<Lane>(i)))
                        .add("busy_seconds", advice.step.lanes[i].busy_seconds)
                        .add("bytes", advice.step.lanes[i].bytes));
  }
  return lanes;
}

std::vector<JsonObject> json_taken(const Advice& advice) {
  std::vector<JsonObject> taken;
  taken.reserve(advice.footprint.taken.size());
  for (const plan::Taken& one : advice.footprint.taken) {
    taken.push_back(JsonObject()
                        .add("what", one.what)
                        .add("tier", tier_name(one.tier))
                        .add("bytes", one.bytes));
  }
  return taken;
}

std::vector<JsonObject> json_tiers(const Advice& advice) {
  std::vector<JsonObject> tiers;
  tiers.reserve(kTiers.size());
  const std::array<double, 3> least = {advice.least.device, advice.least.host,
                                       advice.least.nvme};
  for (std::size_t i = 0; i < kTiers.size(); ++i) {
    tiers.push_back(
        JsonObject()
            .add("tier", tier_name(kTiers[i]))
            .add("taken_bytes", advice.footprint.on(kTiers[i]))
            .add("capacity_bytes", capacity(advice.setup.cluster, kTiers[i]))
            .add("least_bytes", least[i]));
  }
  return tiers;
}

void add_speed(const Request& request, const Advice& advice, JsonObject& json) {
  json.add("step_seconds", advice.step.seconds)
      .add("compute_seconds", advice.step.compute_seconds)
      .add("efficiency", advice.step.efficiency())
      .add("tokens_per_second", advice.tokens_per_second)
      .add("tflops_per_device",
           model_flops_per_second(advice.setup, advice.step) / 1e12)
      .add("bound_by", lane_name(advice.bounds[0].lane))
      .add("written_bytes_per_drive_day", advice.written_per_drive_day)
      .add("kept_bytes", advice.kept_bytes)
      .add("lanes", json_lanes(advice))
      .add("projected", advice.projected);
  if (request.tokens > 0)
    json.add("seconds_to_tokens", advice.seconds_to_tokens)
        .add("cost", advice.cost);
}

}  // namespace

void print_advice(const Request& request, const Advice& advice) {
  print_head(request, advice);
  print_memory(advice);
  if (!advice.fits()) {
    print_shortages(advice);
    return;
  }
  print_speed(request, advice);
  if (!advice.projected.empty()) {
    std::printf("  projected, the engine does not do it yet: %s\n",
                joined(advice.projected).c_str());
  }
}

JsonObject json_of(const Request& request, const Advice& advice) {
  JsonObject json;
  json.add("model", request.shape.name)
      .add("params", total_params(request.shape))
      .add("cluster", request.cluster.name)
      .add("devices", request.cluster.devices())
      .add("batch", request.batch)
      .add("micro_batches", advice.setup.micro_batches)
      .add("precision", request.precision)
      .add("fits", advice.fits())
      .add("weights_on", tier_name(advice.setup.placement.weights))
      .add("states_on", tier_name(advice.setup.placement.states))
      .add("activations_on", tier_name(advice.setup.placement.activations))
      .add("memory", json_taken(advice))
      .add("tiers", json_tiers(advice));
  if (advice.fits()) {
    add_speed(request, advice, json);
    return json;
  }
  std::vector<JsonObject> shortages;
  shortages.reserve(advice.shortages.size());
  for (const plan::Shortage& one : advice.shortages) {
    shortages.push_back(JsonObject()
                            .add("tier", tier_name(one.tier))
                            .add("needs_bytes", one.needs)
                            .add("has_bytes", one.has));
  }
  return json.add("shortages", shortages).add("helps", advice.helps);
}

void print_sweep(const std::vector<Varied>& sweep) {
  std::printf("%-28s %-9s %-9s %-12s %10s %12s %11s  %s\n", "what if",
              "weights", "states", "activations", "step", "tokens/s",
              "efficiency", "bound by");
  for (const Varied& one : sweep) {
    const Advice& advice = one.advice;
    const plan::Placement& at = advice.setup.placement;
    std::printf("%-28s ",
                (one.variation.name + "=" + one.variation.value).c_str());
    if (!advice.fits()) {
      std::printf(
          "does not fit: %s of %s missing\n",
          bytes_text(advice.shortages[0].needs - advice.shortages[0].has)
              .c_str(),
          std::string(tier_name(advice.shortages[0].tier)).c_str());
      continue;
    }
    std::printf("%-9s %-9s %-12s %10s %12.4g %10.1f%%  %s\n",
                std::string(tier_name(at.weights)).c_str(),
                std::string(tier_name(at.states)).c_str(),
                std::string(tier_name(at.activations)).c_str(),
                time_text(advice.step.seconds).c_str(),
                advice.tokens_per_second, 100 * advice.step.efficiency(),
                std::string(lane_name(advice.bounds[0].lane)).c_str());
  }
}

JsonObject json_of(const std::vector<Varied>& sweep) {
  std::vector<JsonObject> all;
  for (const Varied& one : sweep) {
    JsonObject json = json_of(one.variation.request, one.advice);
    all.push_back(json.add("what_if", one.variation.name)
                      .add("value", one.variation.value));
  }
  return JsonObject().add("sweep", all);
}

}  // namespace zinf::cli
