#include "zinf/model_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "src/base/strf.h"
#include "src/base/suggest.h"

namespace zinf::plan {
namespace {

using nlohmann::json;

// Longer contexts are rarely trained at in full: --seq says otherwise.
constexpr std::uint64_t kUsualSeq = 4096;

// Looks members up, and remembers what was missing.
class Reader {
 public:
  explicit Reader(const json& config) : config_(config) {}

  double need(const char* name) {
    const json* found = find(name);
    if (found == nullptr) {
      problems_ += (problems_.empty() ? "" : ", ") + std::string(name);
      return 1;
    }
    return positive(name, *found);
  }
  double get(const char* name, double otherwise) {
    const json* found = find(name);
    return found == nullptr ? otherwise : positive(name, *found);
  }
  bool flag(const char* name, bool otherwise) const {
    const json* found = find(name);
    return found != nullptr && found->is_boolean() ? found->get<bool>()
                                                   : otherwise;
  }
  std::string text(const char* name) const {
    const json* found = find(name);
    return found != nullptr && found->is_string() ? found->get<std::string>()
                                                  : "";
  }

  // Numbers that contradict each other.
  void refuse(const std::string& text) { contradiction_ = text; }

  Status status() const {
    if (!problems_.empty()) {
      return Status::error(
          Code::kInvalid,
          "model configuration: must be positive numbers: " + problems_);
    }
    if (contradiction_.empty()) return {};
    return Status::error(Code::kInvalid,
                         "model configuration: " + contradiction_);
  }

 private:
  const json* find(const char* name) const {
    const auto found = config_.find(name);
    return found == config_.end() || found->is_null() ? nullptr : &*found;
  }
  double positive(const char* name, const json& value) {
    const double number = value.is_number() ? value.get<double>() : 0;
    if (number >= 1 && number <= 1e12) return number;
    problems_ += (problems_.empty() ? "" : ", ") + std::string(name);
    return 1;
  }

  const json& config_;
  std::string problems_;
  std::string contradiction_;
};

// A linear map, without and with a bias.
double linear(double in, double out) { return in * out; }
double affine(double in, double out) { return in * out + out; }

// Sizes that most configurations share.
struct Sizes {
  double layers, hidden, heads, vocab, positions;
};

ModelShape shape_of(const Sizes& sizes) {
  return {
      .layers = static_cast<std::uint64_t>(sizes.layers),
      .hidden = static_cast<std::uint64_t>(sizes.hidden),
      .heads = static_cast<std::uint64_t>(sizes.heads),
      .vocab = static_cast<std::uint64_t>(sizes.vocab),
      .seq = std::min(static_cast<std::uint64_t>(sizes.positions), kUsualSeq)};
}

Sizes usual_sizes(Reader& read) {
  return {.layers = read.need("num_hidden_layers"),
          .hidden = read.need("hidden_size"),
          .heads = read.need("num_attention_heads"),
          .vocab = read.need("vocab_size"),
          .positions = read.get("max_position_embeddings", kUsualSeq)};
}

// llama and its kin: gated maps, grouped keys and values, RMS norms.
ModelShape gated(Reader& read, const std::string& type) {
  const Sizes sizes = usual_sizes(read);
  const double hidden = sizes.hidden;
  const double inner = read.need("intermediate_size");
  const double head = read.get("head_dim", hidden / sizes.heads);
  const double queries = sizes.heads * head;
  const double keys = read.get("num_key_value_heads", sizes.heads) * head;
  const double key_heads = keys / head;
  if (key_heads > sizes.heads ||
      std::fmod(sizes.heads, std::max(key_heads, 1.0)) != 0)
    read.refuse("num_key_value_heads must divide num_attention_heads");
  const bool biased = read.flag("attention_bias", false);
  double block =
      linear(hidden, queries + 2 * keys) + linear(queries, hidden) + 2 * hidden;
  if (biased || type == "qwen2") block += queries + 2 * keys;
  if (biased && type != "qwen2") block += hidden;
  if (type == "qwen3") block += 2 * head;
  const double maps = 3 * linear(hidden, inner) +
                      (read.flag("mlp_bias", false) ? 2 * inner + hidden : 0);
  ModelShape shape = shape_of(sizes);
  shape.block_params = block + maps;
  if (type == "mixtral") {
    const double experts = read.need("num_local_experts");
    if (read.get("num_experts_per_tok", 2) > experts)
      read.refuse("num_experts_per_tok is more than num_local_experts");
    const double router = linear(hidden, experts);
    shape.active_block_params =
        block + router + read.get("num_experts_per_tok", 2) * maps;
    shape.block_params = block + router + experts * maps;
  }
  const bool tied = read.flag("tie_word_embeddings", type == "gemma");
  shape.other_params = (tied ? 1 : 2) * sizes.vocab * hidden + hidden;
  shape.largest_params = hidden * std::max({inner, queries, sizes.vocab});
  return shape;
}

// Two maps per block with biases, and layer norms: gpt2 and its kin.
struct Plain {
  Sizes sizes;
  double inner;
  double block_norms = 2;  // of 2 hidden each
  double others = 0;       // besides the embeddings of tokens
};

ModelShape plain(const Plain& plain) {
  const double hidden = plain.sizes.hidden;
  ModelShape shape = shape_of(plain.sizes);
  shape.block_params = affine(hidden, 3 * hidden) + affine(hidden, hidden) +
                       affine(hidden, plain.inner) +
                       affine(plain.inner, hidden) +
                       plain.block_norms * 2 * hidden;
  shape.other_params = plain.sizes.vocab * hidden + plain.others;
  shape.largest_params =
      hidden * std::max({plain.inner, 3 * hidden, plain.sizes.vocab});
  return shape;
}

ModelShape gpt2(Reader& read) {
  const double hidden = read.need("n_embd");
  const double positions = read.get("n_positions", 1024);
  return plain({.sizes = {.layers = read.need("n_layer"),
                          .hidden = hidden,
                          .heads = read.need("n_head"),
                          .vocab = read.need("vocab_size"),
                          .positions = positions},
                .inner = read.get("n_inner", 4 * hidden),
                .others = positions * hidden + 2 * hidden});
}

ModelShape gpt_neox(Reader& read) {
  const Sizes sizes = usual_sizes(read);
  const bool tied = read.flag("tie_word_embeddings", false);
  return plain(
      {.sizes = sizes,
       .inner = read.need("intermediate_size"),
       .others = (tied ? 0 : sizes.vocab * sizes.hidden) + 2 * sizes.hidden});
}

ModelShape opt(Reader& read) {
  const Sizes sizes = usual_sizes(read);
  return plain(
      {.sizes = sizes,
       .inner = read.need("ffn_dim"),
       // Its positions begin at 2.
       .others = (sizes.positions + 2) * sizes.hidden + 2 * sizes.hidden});
}

ModelShape phi(Reader& read) {
  const Sizes sizes = usual_sizes(read);
  return plain(
      {.sizes = sizes,
       .inner = read.need("intermediate_size"),
       .block_norms = 1,
       .others = affine(sizes.hidden, sizes.vocab) + 2 * sizes.hidden});
}

ModelShape bert(Reader& read) {
  const Sizes sizes = usual_sizes(read);
  const double types = read.get("type_vocab_size", 2);
  return plain({.sizes = sizes,
                .inner = read.need("intermediate_size"),
                .others = (sizes.positions + types) * sizes.hidden +
                          2 * sizes.hidden +
                          affine(sizes.hidden, sizes.hidden)});
}

// Encoder and decoder blocks count as layers of their mean size.
ModelShape t5(Reader& read) {
  const double encoders = read.need("num_layers");
  const double decoders = read.get("num_decoder_layers", encoders);
  const Sizes sizes{.layers = encoders + decoders,
                    .hidden = read.need("d_model"),
                    .heads = read.need("num_heads"),
                    .vocab = read.need("vocab_size"),
                    .positions = read.get("n_positions", 512)};
  const double inner = read.need("d_ff");
  const double attention =
      4 * linear(sizes.hidden, sizes.heads * read.need("d_kv"));
  const bool is_gated =
      read.text("feed_forward_proj").find("gated") != std::string::npos;
  const double maps = (is_gated ? 3 : 2) * linear(sizes.hidden, inner);
  const double encoder = attention + maps + 2 * sizes.hidden;
  const double decoder = 2 * attention + maps + 3 * sizes.hidden;
  ModelShape shape = shape_of(sizes);
  shape.block_params = (encoders * encoder + decoders * decoder) / sizes.layers;
  const double buckets = read.get("relative_attention_num_buckets", 32);
  const bool tied = read.flag("tie_word_embeddings", true);
  shape.other_params = (tied ? 1 : 2) * sizes.vocab * sizes.hidden +
                       2 * buckets * sizes.heads + 2 * sizes.hidden;
  shape.largest_params = sizes.hidden * std::max(inner, sizes.vocab);
  return shape;
}

const std::array<std::string, 6> kGated = {"llama", "mistral", "qwen2",
                                           "qwen3", "gemma",   "mixtral"};

struct PlainType {
  const char* name;
  ModelShape (*make)(Reader&);
};
constexpr std::array<PlainType, 6> kOthers = {{{"gpt2", gpt2},
                                               {"gpt_neox", gpt_neox},
                                               {"opt", opt},
                                               {"phi", phi},
                                               {"bert", bert},
                                               {"t5", t5}}};

Result<ModelShape> make_shape(const std::string& type, Reader& read) {
  if (std::ranges::find(kGated, type) != kGated.end()) return gated(read, type);
  for (const PlainType& other : kOthers)
    if (type == other.name) return other.make(read);
  const std::vector<std::string> known = model_types();
  const std::string near = nearest_name(type, known);
  std::string hint = "did you mean " + near + "?";
  if (near.empty()) {
    hint = "known are";
    for (const std::string& name : known)
      hint += (name == known[0] ? " " : ", ") + name;
    hint += "; a safetensors file, or --layers, --hidden and so on, do too";
  }
  return Status::error(Code::kInvalid, strf("unknown model_type \"%s\": %s",
                                            type.c_str(), hint.c_str()));
}

}  // namespace

std::vector<std::string> model_types() {
  std::vector<std::string> names(kGated.begin(), kGated.end());
  for (const PlainType& other : kOthers) names.emplace_back(other.name);
  return names;
}

Result<ModelShape> parse_config(std::string_view text) {
  const json config = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    return Status::error(Code::kInvalid,
                         "model configuration: not a JSON object");
  }
  Reader read(config);
  const std::string type = read.text("model_type");
  if (type.empty()) {
    return Status::error(Code::kInvalid,
                         "model configuration: no model_type in it");
  }
  ZINF_ASSIGN(ModelShape shape, make_shape(type, read));
  ZINF_TRY(read.status());
  shape.name = type;
  ZINF_TRY(check(shape));
  return shape;
}

}  // namespace zinf::plan
