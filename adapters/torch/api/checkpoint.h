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

Loaded load_checkpoint(const std::string& path, const Models& models,
                       const std::vector<AdamW*>& optimizers);

// Weights and buffers alone: what the optimizers have stays.
Loaded load_weights(const std::string& path, const Models& models,
                    const std::vector<AdamW*>& optimizers);

}  // namespace zinf
