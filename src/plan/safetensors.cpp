// Shapes from what lies in a folder: the header of a safetensors file is all
// that is read of it.
#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "src/base/strf.h"
#include "zinf/model_config.h"

namespace zinf::plan {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMostHeaderBytes = 100'000'000;  // as the format says

Status corrupt(const std::string& text) {
  return Status::error(Code::kInvalid, "safetensors header: " + text);
}

bool is_number(std::string_view part) {
  return !part.empty() &&
         std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; });
}

// What the tensors of a layer have in common, "" where there is none: the name
// up to its first number. "model.layers.7.mlp.up_proj.weight" is of
// "model.layers.7".
std::string numbered_layer(std::string_view name) {
  std::size_t begin = 0;
  while (begin < name.size()) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    if (is_number(name.substr(begin, end - begin)))
      return std::string(name.substr(0, end));
    begin = end + 1;
  }
  return "";
}

// Where no layer is numbered: its module. "encoder.weight" is of "encoder".
std::string module_of(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return std::string(dot == name.npos ? name : name.substr(0, dot));
}

Result<NamedShape> read_tensor(const std::string& name, const json& entry) {
  if (!entry.is_object() || !entry.contains("shape") ||
      !entry["shape"].is_array())
    return corrupt(name + " has no shape");
  NamedShape tensor{.name = name, .sizes = {}};
  for (const json& size : entry["shape"]) {
    if (!size.is_number_unsigned())
      return corrupt(name + " has a size that is no number");
    tensor.sizes.push_back(size.get<std::uint64_t>());
  }
  return tensor;
}

double elements(const NamedShape& tensor) {
  double count = 1;
  for (const std::uint64_t size : tensor.sizes) count *= double(size);
  return count;
}

// What a model's tensors add up to.
struct Sums {
  std::set<std::string> layers;
  double in_layers = 0;
  double others = 0;
  double largest = 0;
  // A transformer's hidden size is the size that occurs most often.
  std::map<std::uint64_t, int> sizes;
};

Sums add_up(const std::vector<NamedShape>& tensors,
            std::string (*layer_of)(std::string_view)) {
  Sums sums;
  for (const NamedShape& tensor : tensors) {
    const std::string layer = layer_of(tensor.name);
    const double count = elements(tensor);
    sums.largest = std::max(sums.largest, count);
    (layer.empty() ? sums.others : sums.in_layers) += count;
    if (layer.empty()) continue;
    sums.layers.insert(layer);
    for (const std::uint64_t size : tensor.sizes) ++sums.sizes[size];
  }
  return sums;
}

// The longest table with a row of the hidden size, outside of layers.
std::uint64_t vocabulary(const std::vector<NamedShape>& tensors,
                         std::uint64_t hidden) {
  std::uint64_t rows = 0;
  for (const NamedShape& one : tensors) {
    const bool table = one.sizes.size() == 2 && one.sizes[1] == hidden;
    if (table && numbered_layer(one.name).empty())
      rows = std::max(rows, one.sizes[0]);
  }
  return rows;
}

bool has_attention(const NamedShape& tensor) {
  return tensor.name.find("attn") != std::string::npos ||
         tensor.name.find("attention") != std::string::npos;
}

Result<std::string> read_header(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open())
    return Status::system("open", path, errno != 0 ? errno : EIO);
  std::array<char, 8> prefix{};
  file.read(prefix.data(), prefix.size());
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, prefix.data(), sizeof bytes);
  static_assert(std::endian::native == std::endian::little);
  if (!file || bytes == 0 || bytes > kMostHeaderBytes)
    return corrupt("the file does not begin with its length").in(path);
  std::string text(bytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(bytes));
  if (!file) return corrupt("the file ends in it").in(path);
  return text;
}

Result<std::string> read_text(const std::string& path) {
  errno = 0;
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file.is_open() || file.bad())
    return Status::system("read", path, errno != 0 ? errno : EIO);
  return text.str();
}

}  // namespace

Result<ModelShape> shape_of(const std::vector<NamedShape>& tensors) {
  Sums sums = add_up(tensors, numbered_layer);
  const bool numbered = !sums.layers.empty();
  if (!numbered) sums = add_up(tensors, module_of);
  if (sums.sizes.empty())
    return Status::error(Code::kInvalid, "the model has no tensors with sizes");
  const auto hidden = std::ranges::max_element(
      sums.sizes, {}, [](const auto& one) { return one.second; });
  ModelShape shape;
  shape.layers = sums.layers.size();
  shape.hidden = hidden->first;
  if (numbered) shape.vocab = vocabulary(tensors, shape.hidden);
  if (std::ranges::any_of(tensors, has_attention))
    shape.heads = usual_heads(shape.hidden);
  shape.block_params = sums.in_layers / double(shape.layers);
  shape.other_params = sums.others;
  shape.largest_params = sums.largest;
  ZINF_TRY(check(shape));
  return shape;
}

Result<ModelShape> parse_safetensors_header(std::string_view text) {
  const json header = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return corrupt("not a JSON object");
  std::vector<NamedShape> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    ZINF_ASSIGN(NamedShape tensor, read_tensor(name, entry));
    tensors.push_back(std::move(tensor));
  }
  Result<ModelShape> shape = shape_of(tensors);
  if (!shape.ok()) return shape.status().in("safetensors header");
  return shape;
}

Result<ModelShape> load_model(const std::string& path) {
  std::error_code error;
  const bool folder = std::filesystem::is_directory(path, error);
  const std::string file = folder ? path + "/config.json" : path;
  const bool tensors = file.ends_with(".safetensors");
  const std::string name = std::filesystem::path(file).filename();
  if (tensors && name.find("-of-") != std::string::npos) {
    return Status::error(Code::kInvalid,
                         file +
                             " is one of several files of a model: name its "
                             "config.json instead");
  }
  Result<std::string> text = tensors ? read_header(file) : read_text(file);
  if (!text.ok()) return text.status();
  Result<ModelShape> shape = tensors ? parse_safetensors_header(text.value())
                                     : parse_config(text.value());
  if (!shape.ok()) return shape.status().in(file);
  return shape;
}

}  // namespace zinf::plan
