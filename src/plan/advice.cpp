#include "zinf/advice.h"

#include <algorithm>
#include <optional>

#include "src/plan/helps.h"
#include "src/plan/search.h"

namespace zinf::plan {
namespace {

std::vector<Shortage> shortages(const Candidate& candidate) {
  std::vector<Shortage> all;
  for (const Tier tier : kTiers) {
    if (candidate.missing(tier) == 0) continue;
    all.push_back({.tier = tier,
                   .needs = candidate.footprint.on(tier),
                   .has = capacity(candidate.setup.cluster, tier)});
  }
  return all;
}

std::vector<std::string> projected(const Setup& setup) {
  std::vector<std::string> all;
  if (setup.cluster.on_host) return all;
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
  ZINF_ASSIGN(const Setup setup, first_setup(request));
  ZINF_TRY(check(setup));
  if (!(request.tokens >= 0 && request.tokens <= 1e18))
    return Status::error(Code::kInvalid, "tokens must be from 0 to 10^18");
  if (request.recompute && request.activation_bytes > 0) {
    return Status::error(Code::kInvalid,
                         "measured activations are those of a step that does "
                         "not recompute them: say --no-recompute "
                         "(recompute=False) too");
  }
  if (double(request.micro_batches) > std::max(request.batch, 1.0)) {
    return Status::error(Code::kInvalid,
                         "more micro-batches than samples per device");
  }
  return {};
}

void set_batch(Request& request, double batch) {
  if (request.batch > 0) request.activation_bytes *= batch / request.batch;
  request.batch = batch;
}

Result<Advice> advise(const Request& request) {
  ZINF_TRY(check(request));
  ZINF_ASSIGN(const std::vector<Candidate> all, candidates(request));
  ZINF_ASSIGN(const std::optional<Quickest> best, quickest(all));
  Advice advice;
  advice.setup = best ? best->setup : nearest(all).setup;
  advice.footprint = footprint(advice.setup);
  for (const Tier tier : kTiers)
    advice.least[static_cast<std::size_t>(tier)] = least_of(all, tier);
  if (!best) {
    advice.shortages = shortages(nearest(all));
    advice.helps = find_helps(request, all);
    return advice;
  }
  advice.step = best->step;
  ZINF_ASSIGN(advice.bounds, bounds(advice.setup));
  advice.projected = projected(advice.setup);
  advice.kept_bytes = kept_bytes(advice.setup, advice.footprint);
  add_speed(request, advice);
  return advice;
}

}  // namespace zinf::plan
