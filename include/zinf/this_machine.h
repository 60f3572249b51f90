// This machine, measured for a plan.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "zinf/cluster.h"
#include "zinf/status.h"

namespace zinf::plan {

// Steps of measuring.
inline constexpr std::uint64_t kMeasuringSteps = 3;

// This machine as a cluster of one node and one rank: memory, arithmetic and
// memory bandwidth, and the disk of `path`, measured now (a few seconds). An
// empty path: no disk. `told` is called after each step, with their number.
Result<Cluster> measure_this_machine(
    const std::string& path,
    const std::function<void(std::uint64_t)>& told = {});

}  // namespace zinf::plan
