// Shapes of models as people have them: a Hugging Face config.json, or the
// header of a safetensors file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zinf/model_shape.h"
#include "zinf/status.h"

namespace zinf::plan {

// The `model_type`s that parse_config() knows.
std::vector<std::string> model_types();

// The text of a config.json. The parameters are counted as the model has them,
// to the last one. `seq` is the configured length, at most 4096. kInvalid for a
// model_type that is not known (with the nearest), and for sizes that are
// missing, zero or contradictory.
Result<ModelShape> parse_config(std::string_view json);

// The header of a safetensors file: its parameters, and a shape from the names
// ("....layers.7....") and sizes of its tensors. kInvalid when it has none.
Result<ModelShape> parse_safetensors_header(std::string_view json);

// A config.json, a folder with one, or a .safetensors file.
Result<ModelShape> load_model(const std::string& path);

}  // namespace zinf::plan
