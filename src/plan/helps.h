// What would make a request fit that does not.
#pragma once

#include <string>
#include <vector>

#include "src/plan/search.h"
#include "zinf/advice.h"

namespace zinf::plan {

// Changes each of which, alone, makes it fit: first those that cost only time,
// then those of machines. Empty when none of those that are tried does. `all`:
// the request's.
std::vector<std::string> find_helps(const Request& request,
                                    const std::vector<Candidate>& all);

}  // namespace zinf::plan
