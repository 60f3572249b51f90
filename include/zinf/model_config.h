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

// A tensor of a model: "model.layers.7.mlp.up_proj.weight".
struct NamedShape {
  std::string name;
  std::vector<std::uint64_t> sizes;
};
// The parameters, and a shape from their names and sizes: a layer is what has
// the same name up to its first number, or where no name has one, up to its
// last dot. kInvalid when there are none.
Result<ModelShape> shape_of(const std::vector<NamedShape>& tensors);

// The same from the header of a safetensors file.
Result<ModelShape> parse_safetensors_header(std::string_view json);

// A config.json, a folder with one, or a .safetensors file.
Result<ModelShape> load_model(const std::string& path);

}  // namespace zinf::plan
