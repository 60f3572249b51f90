// Checkpoints of an engine's models and optimizers, as
// python/zinf/checkpoint.py writes and reads them. All throw.
#pragma once

#include <string>
#include <vector>

#include "adapters/torch/api/engine_impl.h"
#include "zinf/engine.h"

namespace zinf {

void save_checkpoint(const std::string& path, const Models& models,
                     const std::vector<AdamW*>& optimizers,
                     const c10::IValue& extra);

// `begun` is set when the first content is about to be changed.
Loaded load_checkpoint(const std::string& path, const Models& models,
                       const std::vector<AdamW*>& optimizers, Manager& manager,
                       bool& begun);

// Weights and buffers alone: what the optimizers have stays.
Loaded load_weights(const std::string& path, const Models& models,
                    const std::vector<AdamW*>& optimizers, Manager& manager,
                    bool& begun);

// How a load that failed after that is told.
std::string unfinished(const std::string& path);

}  // namespace zinf
