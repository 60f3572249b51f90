#include "src/plan/search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

namespace zinf::plan {
namespace {

// What is used more often lives higher.
bool makes_sense(const Placement& at) {
  return at.weights <= at.states && at.weights <= at.grads &&
         at.grads <= at.states;
}

bool uses(const Placement& at, Tier tier) {
  return at.weights == tier || at.grads == tier || at.states == tier ||
         at.activations == tier;
}

std::vector<Placement> placements(const Setup& setup) {
  std::vector<Placement> all;
  const auto add = [&](const Placement& at) {
    if (!makes_sense(at)) return;
    // Gradients that do not wait have no place of their own.
    if (!keeps_grads(setup) && at.grads != at.weights) return;
    // Where devices compute in host memory the two are one.
    if (setup.cluster.on_host && uses(at, Tier::kHost)) return;
    // The engine keeps activations where they are computed there.
    if (setup.cluster.on_host && at.activations == Tier::kNvme) return;
    if (setup.cluster.nvme_bytes <= 0 && uses(at, Tier::kNvme)) return;
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

// Powers of two, and one sample each: with more layers passed in a step the
// search would take long.
constexpr double kMostPasses = 1e5;
std::vector<std::uint64_t> micro_counts(const Request& request) {
  if (request.micro_batches > 0) return {request.micro_batches};
  const double most = std::floor(
      std::min(request.batch,
               kMostPasses / std::max(1.0, double(request.shape.layers))));
  std::vector<std::uint64_t> counts = {1};
  while (2 * double(counts.back()) <= most) counts.push_back(2 * counts.back());
  if (double(counts.back()) < most)
    counts.push_back(static_cast<std::uint64_t>(most));
  return counts;
}

}  // namespace

Result<Setup> first_setup(const Request& request) {
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

double Candidate::missing(Tier tier) const {
  return std::max(0.0, footprint.on(tier) - capacity(setup.cluster, tier));
}

bool Candidate::fits() const {
  return std::ranges::all_of(kTiers,
                             [&](Tier tier) { return missing(tier) == 0; });
}

Result<std::vector<Candidate>> candidates(const Request& request) {
  ZINF_ASSIGN(Setup setup, first_setup(request));
  std::vector<Candidate> all;
  for (const std::uint64_t count : micro_counts(request)) {
    setup.micro_batches = count;
    for (const Placement& placement : placements(setup)) {
      setup.placement = placement;
      all.push_back({setup, footprint(setup)});
    }
  }
  const auto order = [](const Candidate& one) {
    const Placement& at = one.setup.placement;
    return std::tuple(one.footprint.on(Tier::kNvme),
                      one.footprint.on(Tier::kHost), one.setup.micro_batches,
                      at.weights, at.grads, at.states, at.activations);
  };
  std::ranges::sort(all, {}, order);
  return all;
}

std::optional<double> least_of(const std::vector<Candidate>& all, Tier tier) {
  std::optional<double> least;
  for (const Candidate& one : all) {
    const bool others_fit = std::ranges::all_of(kTiers, [&](Tier other) {
      return other == tier || one.missing(other) == 0;
    });
    if (!others_fit) continue;
    const double needs = one.footprint.on(tier);
    if (!least || needs < *least) least = needs;
  }
  return least;
}

const Candidate& nearest(const std::vector<Candidate>& all) {
  const auto lack = [](const Candidate& one) {
    int tiers = 0;
    double bytes = 0;
    for (const Tier tier : kTiers) {
      tiers += one.missing(tier) > 0 ? 1 : 0;
      bytes += one.missing(tier);
    }
    return std::pair(tiers, bytes);
  };
  return *std::ranges::min_element(all, {}, lack);
}

Result<std::optional<Quickest>> quickest(const std::vector<Candidate>& all) {
  // Less of a difference is none: sums of the same times in another order.
  constexpr double kEqual = 1 - 1e-9;
  std::optional<Quickest> best;
  double below = std::numeric_limits<double>::infinity();
  for (const Candidate& one : all) {
    if (!one.fits()) continue;
    ZINF_ASSIGN(const auto step, forecast_below(one.setup, below));
    if (!step) continue;
    best = Quickest{one.setup, *step};
    below = kEqual * step->seconds;
  }
  return best;
}

}  // namespace zinf::plan
