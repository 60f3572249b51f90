// Advice as people read it, and as programs do.
#pragma once

#include <string>
#include <vector>

#include "zinf/advice.h"
#include "zinf/what_if.h"

namespace zinf::plan {

// Several lines: what goes where, what fits, how fast.
std::string text_of(const Request& request, const Advice& advice);
// One line for each.
std::string text_of(const std::vector<Varied>& sweep);

// One JSON object: docs/plan.md names its members.
std::string json_of(const Request& request, const Advice& advice);
std::string json_of(const std::vector<Varied>& sweep);

}  // namespace zinf::plan
