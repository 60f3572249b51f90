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
#include <optional>
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

// The number of the first part of a tensor's name that is one:
// "model.layers.7.mlp.up_proj.weight" is of layer 7.
std::optional<std::uint64_t> layer_of(const std::string& name) {
  std::istringstream parts(name);
  std::string part;
  while (std::getline(parts, part, '.')) {
    const bool digits =
        !part.empty() && part.size() < 8 &&
        std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; });
    if (digits) return std::stoull(part);
  }
  return std::nullopt;
}

struct Tensor {
  std::vector<double> sizes;
  double elements = 1;
};

Result<Tensor> read_tensor(const std::string& name, const json& entry) {
  Tensor tensor;
  if (!entry.is_object() || !entry.contains("shape") ||
      !entry["shape"].is_array())
    return corrupt(name + " has no shape");
  for (const json& size : entry["shape"]) {
    if (!size.is_number_unsigned())
      return corrupt(name + " has a size that is no number");
    tensor.sizes.push_back(size.get<double>());
    tensor.elements *= tensor.sizes.back();
  }
  return tensor;
}

// What a file's tensors add up to.
struct Sums {
  std::set<std::uint64_t> layers;
  double in_layers = 0;
  double others = 0;
  double largest = 0;
  // A transformer's hidden size is the size that occurs most often.
  std::map<double, int> sizes;
};

Result<Sums> add_up(const json& header) {
  Sums sums;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    ZINF_ASSIGN(const Tensor tensor, read_tensor(name, entry));
    const auto layer = layer_of(name);
    if (layer) sums.layers.insert(*layer);
    (layer ? sums.in_layers : sums.others) += tensor.elements;
    if (tensor.sizes.size() == 2)
      sums.largest = std::max(sums.largest, tensor.elements);
    if (!layer) continue;
    for (const double size : tensor.sizes) ++sums.sizes[size];
  }
  return sums;
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

Result<ModelShape> parse_safetensors_header(std::string_view text) {
  const json header = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return corrupt("not a JSON object");
  ZINF_ASSIGN(const Sums sums, add_up(header));
  if (sums.layers.empty() || sums.sizes.empty())
    return corrupt("no tensor of a numbered layer is in it");
  const auto hidden = std::ranges::max_element(
      sums.sizes, {}, [](const auto& one) { return one.second; });
  ModelShape shape;
  shape.layers = sums.layers.size();
  shape.hidden = static_cast<std::uint64_t>(hidden->first);
  shape.block_params = sums.in_layers / double(shape.layers);
  shape.other_params = sums.others;
  shape.largest_params = sums.largest;
  ZINF_TRY(check(shape));
  return shape;
}

Result<ModelShape> load_model(const std::string& path) {
  std::error_code error;
  const bool folder = std::filesystem::is_directory(path, error);
  const std::string file = folder ? path + "/config.json" : path;
  const bool tensors = file.ends_with(".safetensors");
  Result<std::string> text = tensors ? read_header(file) : read_text(file);
  if (!text.ok()) return text.status();
  Result<ModelShape> shape = tensors ? parse_safetensors_header(text.value())
                                     : parse_config(text.value());
  if (!shape.ok()) return shape.status().in(file);
  return shape;
}

}  // namespace zinf::plan
