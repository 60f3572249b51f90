// Advice: whether a model trains on a cluster, with what where, and how fast.
//
// Of the placements that fit, the quickest is advised; of those that are
// equally quick, the one with the most in the higher tiers. More memory never
// makes the advice slower. When nothing fits, the advice says which tier is
// short by how much, and which changes would help: each was tried.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zinf/setup.h"
#include "zinf/status.h"
#include "zinf/step_forecast.h"

namespace zinf::plan {

struct Request {
  ModelShape shape;
  Cluster cluster;
  double batch = 1;                 // samples per device and step
  std::uint64_t micro_batches = 0;  // 0: as few as fit
  std::uint64_t tiles = 1;
  std::string precision = "bf16";
  bool recompute = true;
  double activation_bytes = 0;  // see Setup
  double tokens = 0;            // to train for; 0: not asked
};

// kInvalid with every problem in one text.
Status check(const Request& request);

// Another batch; measured activations grow and shrink with it.
void set_batch(Request& request, double batch);

struct Shortage {
  Tier tier = Tier::kDevice;
  double needs = 0;  // of a rank
  double has = 0;
};

struct Advice {
  Setup setup;
  Footprint footprint;
  // Of a rank, by tier: the least with which it fits while the other tiers are
  // as they are. Nothing: it does not, however much there is of this tier.
  std::array<std::optional<double>, kTiers.size()> least;
  // Empty when it fits; otherwise what follows is not there.
  std::vector<Shortage> shortages;
  // What would make it fit: first what costs only time, then machines.
  std::vector<std::string> helps;

  StepForecast step;
  std::vector<Bound> bounds;
  double tokens_per_second = 0;  // of the whole cluster
  double written_per_drive_day = 0;
  double kept_bytes = 0;  // of states on NVMe, what host memory has room for
  double seconds_to_tokens = 0;
  std::optional<double> cost;  // when the price is known
  // What the advice counts on that the engine does not do yet.
  std::vector<std::string> projected;

  bool fits() const { return shortages.empty(); }
};

// kInvalid for a request that makes no sense. Not to fit is no error.
Result<Advice> advise(const Request& request);

}  // namespace zinf::plan
