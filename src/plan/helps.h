// What would make a request fit that does not.
#pragma once

#include <string>
#include <vector>

#include "zinf/advice.h"

namespace zinf::plan {

// Changes each of which, alone, makes it fit: the cheapest first. Empty when
// none of those that are tried does.
std::vector<std::string> find_helps(const Request& request);

}  // namespace zinf::plan
