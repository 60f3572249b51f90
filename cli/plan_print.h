// How plans are shown: tables for people, JSON for programs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/base/json.h"
#include "zinf/advice.h"
#include "zinf/what_if.h"

namespace zinf::cli {

enum class Output : std::uint8_t { kText, kJson };

void print_advice(const plan::Request& request, const plan::Advice& advice);
JsonObject json_of(const plan::Request& request, const plan::Advice& advice);

// A sweep: one line for each.
struct Varied {
  plan::Variation variation;
  plan::Advice advice;
};
void print_sweep(const std::vector<Varied>& sweep);
JsonObject json_of(const std::vector<Varied>& sweep);

Status print_paper(Output output);
Status print_beyond(Output output);

// This machine as a cluster of one node and one rank: memory, arithmetic and
// memory bandwidth, and the disk of `path`, measured now (a few seconds).
Result<plan::Cluster> measure_this_machine(const std::string& path);

}  // namespace zinf::cli
