// What every group must do: cases that all of its ranks run at once.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "zinf/comm.h"

namespace zinf {

struct CommCase {
  std::string name;
  // Why it failed, or nothing. Leaves no message behind.
  std::function<std::string(Comm&)> run;
};

// In this order: the last one closes the group.
std::vector<CommCase> comm_cases();

// Runs all of them; the first failure, with the name of its case, or nothing.
std::string run_comm_cases(Comm& comm);

}  // namespace zinf
