#include <cmath>
#include <optional>

#include "src/base/json.h"
#include "zinf/advice_text.h"

namespace zinf::plan {
namespace {

std::vector<JsonObject> json_lanes(const Advice& advice) {
  std::vector<JsonObject> lanes;
  lanes.reserve(kLanes);
  for (std::size_t i = 0; i < kLanes; ++i) {
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
  for (const Taken& one : advice.footprint.taken) {
    taken.push_back(JsonObject()
                        .add("what", one.what)
                        .add("tier", tier_name(one.tier))
                        .add("bytes", std::ceil(one.bytes)));
  }
  return taken;
}

// Whole bytes, that are enough.
std::optional<double> up(std::optional<double> bytes) {
  return bytes ? std::optional(std::ceil(*bytes)) : bytes;
}

std::vector<JsonObject> json_tiers(const Advice& advice) {
  std::vector<JsonObject> tiers;
  tiers.reserve(kTiers.size());
  for (std::size_t i = 0; i < kTiers.size(); ++i) {
    tiers.push_back(
        JsonObject()
            .add("tier", tier_name(kTiers[i]))
            .add("taken_bytes", std::ceil(advice.footprint.on(kTiers[i])))
            .add("capacity_bytes",
                 std::floor(capacity(advice.setup.cluster, kTiers[i])))
            .add("least_bytes", up(advice.least[i])));
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

void add_shortages(const Advice& advice, JsonObject& json) {
  std::vector<JsonObject> shortages;
  shortages.reserve(advice.shortages.size());
  for (const Shortage& one : advice.shortages) {
    shortages.push_back(JsonObject()
                            .add("tier", tier_name(one.tier))
                            .add("needs_bytes", std::ceil(one.needs))
                            .add("has_bytes", one.has));
  }
  json.add("shortages", shortages).add("helps", advice.helps);
}

JsonObject object_of(const Request& request, const Advice& advice) {
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
  } else {
    add_shortages(advice, json);
  }
  return json;
}

}  // namespace

std::string json_of(const Request& request, const Advice& advice) {
  return object_of(request, advice).text();
}

std::string json_of(const std::vector<Varied>& sweep) {
  std::vector<JsonObject> all;
  all.reserve(sweep.size());
  for (const Varied& one : sweep) {
    JsonObject json = object_of(one.variation.request, one.advice);
    all.push_back(json.add("what_if", one.variation.name)
                      .add("value", one.variation.value));
  }
  return JsonObject().add("sweep", all).text();
}

}  // namespace zinf::plan
