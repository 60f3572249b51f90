#pragma once

#include <string>

#include "zinf/cluster.h"
#include "zinf/status.h"

namespace zinf::cli {

// This machine as a cluster of one node and one rank: memory, arithmetic and
// memory bandwidth, and the disk of `path`, measured now (a few seconds). An
// empty path: no disk.
Result<plan::Cluster> measure_this_machine(const std::string& path);

}  // namespace zinf::cli
