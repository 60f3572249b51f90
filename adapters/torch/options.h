#pragma once

#include "adapters/torch/manager.h"

namespace zinf {

struct EngineOptions;

// What a user's options say. Throws what is wrong with them; the directories
// are tried.
ManagerOptions manager_options(const EngineOptions& options);

}  // namespace zinf
