// Sweeps: the same request with one thing changed.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zinf/advice.h"
#include "zinf/status.h"

namespace zinf::plan {

struct Variation {
  std::string name;   // "device_memory"
  std::string value;  // "24GB", as it was written
  Request request;
};

// "device_memory=24GB,80GB": the request with each of the values. Names are
// those of what_if_names(). kInvalid for another name (with the nearest), for a
// value that is none, and for a request that makes no sense with it.
Result<std::vector<Variation>> what_if(const Request& request,
                                       std::string_view text);
std::vector<std::string> what_if_names();

// The same with the advice for each.
struct Varied {
  Variation variation;
  Advice advice;
};
Result<std::vector<Varied>> sweep(const Request& request,
                                  std::string_view text);

// One change: a memory size is for one process (a rank), as in the engine.
Status set(Request& request, std::string_view name, std::string_view value);
// Several, in whatever order: names and values.
using Changes = std::vector<std::pair<std::string, std::string>>;
Status set_all(Request& request, const Changes& changes);

}  // namespace zinf::plan
