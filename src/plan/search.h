// The ways in which a request can be trained, and the best of them.
#pragma once

#include <optional>
#include <vector>

#include "zinf/advice.h"

namespace zinf::plan {

// The request in one micro-batch, everything on the device.
Result<Setup> first_setup(const Request& request);

// A placement and a number of micro-batches.
struct Candidate {
  Setup setup;
  Footprint footprint;

  double missing(Tier tier) const;  // bytes of a rank; 0: it fits
  bool fits() const;
};

// All that make sense, whether they fit or not: the fewest bytes on NVMe first,
// then the fewest in host memory, then the fewest micro-batches.
Result<std::vector<Candidate>> candidates(const Request& request);

// The least of a tier with which one of them fits while the other tiers are as
// they are. Nothing: none does, however much there is.
std::optional<double> least_of(const std::vector<Candidate>& all, Tier tier);

// The one that comes nearest to fitting: the fewest tiers are short, then the
// fewest bytes are missing. So where more of one tier would do, that one is
// short, by what least_of() says.
const Candidate& nearest(const std::vector<Candidate>& all);

struct Quickest {
  Setup setup;
  StepForecast step;
};
// Of those that fit, the first of the quickest; nothing when none does.
Result<std::optional<Quickest>> quickest(const std::vector<Candidate>& all);

}  // namespace zinf::plan
