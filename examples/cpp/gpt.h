// A small GPT that learns the bytes of a text. Plain libtorch: nothing in it
// knows of zinf.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

namespace gpt {

namespace F = torch::nn::functional;
using torch::Tensor;

constexpr int kVocabulary = 256;  // bytes
constexpr int kLayers = 2;
constexpr int kWidth = 64;
constexpr int kHeads = 4;
constexpr int kLength = 64;
constexpr int kBatch = 4;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    attention_norm = register_module(
        "attention_norm",
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    project = register_module("project", torch::nn::Linear(kWidth, kWidth));
    mlp_norm = register_module(
        "mlp_norm",
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }

  Tensor forward(Tensor x) {
    auto batch = x.size(0);
    auto length = x.size(1);
    Tensor all = qkv(attention_norm(x))
                     .view({batch, length, 3, kHeads, kWidth / kHeads})
                     .permute({2, 0, 3, 1, 4});
    Tensor mixed = at::scaled_dot_product_attention(
        all[0], all[1], all[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
        /*is_causal=*/true);
    x = x + project(mixed.transpose(1, 2).reshape({batch, length, kWidth}));
    return x + down(torch::gelu(up(mlp_norm(x))));
  }

  torch::nn::LayerNorm attention_norm = nullptr, mlp_norm = nullptr;
  torch::nn::Linear qkv = nullptr, project = nullptr;
  torch::nn::Linear up = nullptr, down = nullptr;
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  GptImpl() {
    tokens =
        register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    positions =
        register_module("positions", torch::nn::Embedding(kLength, kWidth));
    for (int i = 0; i < kLayers; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    torch::NoGradGuard no_grad;
    tokens->weight.normal_(0, 0.02);
    positions->weight.normal_(0, 0.02);
  }

  Tensor forward(const Tensor& bytes) {
    Tensor x = tokens(bytes) + positions(torch::arange(bytes.size(1)));
    // The head is tied to the embedding.
    return torch::linear(norm(blocks->forward(x)), tokens->weight);
  }

  torch::nn::Embedding tokens = nullptr, positions = nullptr;
  torch::nn::Sequential blocks;
  torch::nn::LayerNorm norm = nullptr;
};
TORCH_MODULE(Gpt);

// Of the texts that begin at these places.
inline Tensor loss_of(Gpt& model, const Tensor& text, const Tensor& starts) {
  Tensor batch = text.index({starts + torch::arange(kLength + 1)});
  Tensor logits = model(batch.slice(1, 0, kLength));
  return F::cross_entropy(logits.reshape({-1, kVocabulary}),
                          batch.slice(1, 1).reshape({-1}));
}

// FNV-1a of all weights' bytes.
inline std::uint64_t hash_of(torch::nn::Module& model) {
  torch::NoGradGuard no_grad;
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const Tensor& parameter : model.parameters()) {
    Tensor copy = parameter.clone();
    const auto* bytes = static_cast<const std::uint8_t*>(copy.const_data_ptr());
    for (std::size_t i = 0; i < copy.nbytes(); ++i) {
      hash = (hash ^ bytes[i]) * 0x100000001b3;
    }
  }
  return hash;
}

// The bytes of a file, if it is long enough.
inline std::optional<Tensor> read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  if (!file || text.size() < kLength + 2) return std::nullopt;
  return torch::from_blob(text.data(), {static_cast<std::int64_t>(text.size())},
                          torch::kUInt8)
      .to(torch::kLong);
}

}  // namespace gpt
