// zinf plan --paper and --beyond: tables for people, JSON for programs.
#pragma once

#include <cstdint>

#include "zinf/status.h"

namespace zinf::cli {

enum class Output : std::uint8_t { kText, kJson };

Status print_paper(Output output);
Status print_beyond(Output output);

}  // namespace zinf::cli
