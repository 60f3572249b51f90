#include "zinf/advice.h"

#include <algorithm>
#include <array>
#include <optional>

#include "src/plan/helps.h"

namespace zinf::plan {
namespace {

constexpr std::array kTiers = {Tier::kDevice, Tier::kHost, Tier::kNvme};

// Every placement that makes sense: what is used more often lives higher.
std::vector<Placement> placements(const Cluster& cluster) {
  std::vector<Placement> all;
  const auto add = [&](const Placement& at) {
    const bool lower = at.states < at.weights || at.grads < at.weights;
    const bool nvme = at.states == Tier::kNvme || at.grads == Tier::kNvme ||
                      at.activations == Tier::kNvme;
    // Where devices compute in host memory the two are one.
    const bool host = at.weights == Tier::kHost || at.grads == Tier::kHost ||
                      at.states == Tier::kHost || at.activations == Tier::kHost;
    if (lower || at.grads > at.states || (cluster.on_host && host) ||
        (nvme && cluster.nvme_bytes <= 0))
      return;
    all.push_back(at);
  };
  for (const Tier weights : kTiers) {
    for (const Tier grads : kTiers) {
      for (const Tier states : kTiers) {
        for (const Tier activations : kTiers)
          add({weights, grads, states, activations});
      }
    }
  }
  return all;
}

Result<Setup> start(const Request& request) {
  ZINF_ASSIGN(const Precision precision, zinf_precision(request.precision));
  Mechanisms mechanisms = zinf_mechanisms();
  mechanisms.tiles = request.tiles;
  return Setup{
      .shape = request.shape,
      .cluster = request.cluster,
      .batch = request.batch,
      .micro_batches = std::max<std::uint64_t>(request.micro_batches, 1),
      .recompute = request.recompute,
      .activation_bytes = request.activation_bytes,
      .precision = precision,
      .placement = {},
      .mechanisms = mechanisms};
}

std::vector<Shortage> shortages(const Setup& setup) {
  std::vector<Shortage> all;
  const Footprint taken = footprint(setup);
  for (const Tier tier : kTiers) {
    const double needs = taken.on(tier);
    const double has = capacity(setup.cluster, tier);
    if (needs > has) all.push_back({.tier = tier, .needs = needs, .has = has});
  }
  return all;
}

// In shares of what there is: the placement that is nearest to fitting.
double lack(const std::vector<Shortage>& all) {
  double sum = 0;
  for (const Shortage& one : all)
    sum += (one.needs - one.has) / std::max(one.has, 1.0);
  return sum;
}

// How many micro-batches to try: with more layers passed in a step the search
// would take long.
constexpr double kMostPasses = 1e5;
std::vector<std::uint64_t> micro_counts(const Request& request) {
  if (request.micro_batches > 0) return {request.micro_batches};
  std::vector<std::uint64_t> counts = {1};
  const auto most = std::min(
      request.batch, kMostPasses / std::max(1.0, double(request.shape.layers)));
  while (2 * double(counts.back()) <= most) counts.push_back(2 * counts.back());
  return counts;
}

struct Best {
  std::optional<Setup> fitting;
  StepForecast step;
  std::optional<Setup> nearest;  // to fitting
  double lacks = 0;
};

// With as few micro-batches as fit: more of them only move more.
Status consider(Setup setup, const std::vector<std::uint64_t>& counts,
                Best& best) {
  for (const std::uint64_t count : counts) {
    setup.micro_batches = count;
    const std::vector<Shortage> short_of = shortages(setup);
    if (short_of.empty()) {
      ZINF_ASSIGN(const StepForecast step, forecast_step(setup));
      if (best.fitting && step.seconds >= best.step.seconds) return {};
      best.fitting = setup;
      best.step = step;
      return {};
    }
    const double lacks = lack(short_of);
    if (best.nearest && lacks >= best.lacks) continue;
    best.nearest = setup;
    best.lacks = lacks;
  }
  return {};
}

Result<Best> search(const Request& request) {
  ZINF_ASSIGN(Setup setup, start(request));
  Best best;
  for (const Placement& placement : placements(request.cluster)) {
    setup.placement = placement;
    ZINF_TRY(consider(setup, micro_counts(request), best));
  }
  return best;
}

LeastBudgets least_budgets(const Request& request, Setup setup) {
  const Tier lowest = setup.cluster.nvme_bytes > 0 ? Tier::kNvme : Tier::kHost;
  setup.placement = {.weights = lowest,
                     .grads = lowest,
                     .states = lowest,
                     .activations = lowest};
  setup.micro_batches = micro_counts(request).back();
  const Footprint taken = footprint(setup);
  return {.device = taken.on(Tier::kDevice),
          .host = taken.on(Tier::kHost),
          .nvme = taken.on(Tier::kNvme)};
}

std::vector<std::string> projected(const Setup& setup) {
  std::vector<std::string> all;
  if (setup.cluster.on_host) {
    if (setup.placement.activations == Tier::kNvme)
      all.emplace_back("activations on NVMe");
    return all;
  }
  if (setup.placement.activations != Tier::kDevice)
    all.emplace_back("activations off the device");
  if (setup.cluster.devices() > 1) all.emplace_back("several devices");
  if (setup.mechanisms.tiles > 1) all.emplace_back("operators in tiles");
  return all;
}

void add_speed(const Request& request, Advice& advice) {
  const Setup& setup = advice.setup;
  const Cluster& cluster = setup.cluster;
  const double seconds = advice.step.seconds;
  advice.tokens_per_second =
      tokens_per_rank(setup) * double(cluster.devices()) / seconds;
  advice.written_per_drive_day = advice.step.lane(Lane::kNvmeWrite).bytes *
                                 double(cluster.devices_per_node) /
                                 double(cluster.drives) / seconds * 86400;
  if (request.tokens <= 0) return;
  advice.seconds_to_tokens = request.tokens / advice.tokens_per_second;
  if (cluster.price_per_hour > 0) {
    advice.cost = advice.seconds_to_tokens / 3600 * cluster.price_per_hour *
                  double(cluster.devices());
  }
}

// Host memory that is left goes to states whose home is NVMe.
double kept_bytes(const Setup& setup, const Footprint& taken) {
  double away = 0;
  for (const Taken& one : taken.taken) {
    const bool state = one.what == "weights" || one.what == "optimizer states";
    if (one.tier == Tier::kNvme && state) away += one.bytes;
  }
  const double left =
      capacity(setup.cluster, Tier::kHost) - taken.on(Tier::kHost);
  return std::clamp(left, 0.0, away);
}

}  // namespace

Status check(const Request& request) {
  ZINF_ASSIGN(const Setup setup, start(request));
  ZINF_TRY(check(setup));
  if (!(request.tokens >= 0 && request.tokens <= 1e18))
    return Status::error(Code::kInvalid, "tokens must be from 0 to 10^18");
  if (double(request.micro_batches) > std::max(request.batch, 1.0)) {
    return Status::error(Code::kInvalid,
                         "more micro-batches than samples per device");
  }
  return {};
}

bool would_fit(const Request& request) {
  Result<Setup> setup = start(request);
  if (!setup.ok()) return false;
  for (const std::uint64_t count : micro_counts(request)) {
    setup.value().micro_batches = count;
    for (const Placement& placement : placements(request.cluster)) {
      setup.value().placement = placement;
      if (shortages(setup.value()).empty()) return true;
    }
  }
  return false;
}

Result<Advice> advise(const Request& request) {
  ZINF_TRY(check(request));
  ZINF_ASSIGN(const Best best, search(request));
  Advice advice;
  advice.setup = best.fitting ? *best.fitting : *best.nearest;
  advice.footprint = footprint(advice.setup);
  advice.least = least_budgets(request, advice.setup);
  if (!best.fitting) {
    advice.shortages = shortages(advice.setup);
    advice.helps = find_helps(request);
    return advice;
  }
  advice.step = best.step;
  ZINF_ASSIGN(advice.bounds, bounds(advice.setup));
  advice.projected = projected(advice.setup);
  advice.kept_bytes = kept_bytes(advice.setup, advice.footprint);
  add_speed(request, advice);
  return advice;
}

}  // namespace zinf::plan
