#include "zinf/model_config.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <fstream>

#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

namespace zinf::plan {
namespace {

struct Known {
  const char* config;
  double params;  // of the published model
};

const Known kKnown[] = {
    {R"({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
         "vocab_size": 50257, "n_positions": 1024, "n_inner": null})",
     124439808},
    {R"({"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
         "num_attention_heads": 32, "vocab_size": 32000,
         "intermediate_size": 11008, "tie_word_embeddings": false})",
     6738415616},
    {R"({"model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096,
         "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 32000, "intermediate_size": 14336})",
     7241732096},
    {R"({"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096,
         "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 32000, "intermediate_size": 14336,
         "num_local_experts": 8, "num_experts_per_tok": 2})",
     46702792704},
    {R"({"model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896,
         "num_attention_heads": 14, "num_key_value_heads": 2,
         "vocab_size": 151936, "intermediate_size": 4864,
         "tie_word_embeddings": true})",
     494032768},
    {R"({"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
         "vocab_size": 151936, "intermediate_size": 3072,
         "tie_word_embeddings": true})",
     596049920},
    {R"({"model_type": "gemma", "num_hidden_layers": 18, "hidden_size": 2048,
         "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
         "vocab_size": 256000, "intermediate_size": 16384})",
     2506172416},
    {R"({"model_type": "gpt_neox", "num_hidden_layers": 44,
         "hidden_size": 6144, "num_attention_heads": 64, "vocab_size": 50432,
         "intermediate_size": 24576, "tie_word_embeddings": false})",
     20554567680},
    {R"({"model_type": "opt", "num_hidden_layers": 12, "hidden_size": 768,
         "num_attention_heads": 12, "vocab_size": 50272, "ffn_dim": 3072,
         "max_position_embeddings": 2048})",
     125239296},
    {R"({"model_type": "phi", "num_hidden_layers": 32, "hidden_size": 2560,
         "num_attention_heads": 32, "vocab_size": 51200,
         "intermediate_size": 10240})",
     2779683840},
    {R"({"model_type": "bert", "num_hidden_layers": 12, "hidden_size": 768,
         "num_attention_heads": 12, "vocab_size": 30522,
         "intermediate_size": 3072, "max_position_embeddings": 512})",
     109482240},
    {R"({"model_type": "t5", "num_layers": 6, "d_model": 512, "num_heads": 8,
         "d_kv": 64, "d_ff": 2048, "vocab_size": 32128})",
     60506624},
};

TEST(ModelConfig, CountsThePublishedModelsToTheLastParameter) {
  for (const Known& known : kKnown) {
    const ModelShape shape = ok(parse_config(known.config));
    EXPECT_NEAR(total_params(shape), known.params, 0.5) << known.config;
  }
}

TEST(ModelConfig, EveryKnownTypeIsAmongThem) {
  for (const std::string& type : model_types()) {
    bool found = false;
    for (const Known& known : kKnown)
      found |= ok(parse_config(known.config)).name == type;
    EXPECT_TRUE(found) << type;
  }
}

TEST(ModelConfig, OfMixtralsExpertsTwoAreActive) {
  const ModelShape shape = ok(parse_config(kKnown[3].config));
  const double active =
      double(shape.layers) * shape.active_block_params + shape.other_params;
  EXPECT_NEAR(active, 12879925248, 0.5);
}

std::string refusal(std::string_view config) {
  const Result<ModelShape> shape = parse_config(config);
  EXPECT_FALSE(shape.ok()) << config;
  return shape.ok() ? "" : shape.status().text();
}

TEST(ModelConfig, BadOnesAreTold) {
  EXPECT_NE(refusal("no").find("not a JSON object"), std::string::npos);
  EXPECT_NE(refusal("{}").find("no model_type"), std::string::npos);
  EXPECT_EQ(refusal(R"({"model_type": "lama"})"),
            "unknown model_type \"lama\": did you mean llama?");
  EXPECT_NE(refusal(R"({"model_type": "resnet"})").find("known are"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"model_type": "llama", "hidden_size": 0})")
                .find("num_hidden_layers, hidden_size"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"model_type": "gpt2", "n_layer": 12, "n_embd": 1e300,
                        "n_head": 1, "vocab_size": 1})")
                .find("n_embd"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"model_type": "gpt2", "n_layer": -1, "n_embd": 64,
                        "n_head": 1, "vocab_size": 1})")
                .find("n_layer"),
            std::string::npos);
}

constexpr const char* kHeader = R"({"__metadata__": {"format": "pt"},
  "embed.weight": {"dtype": "F32", "shape": [100, 8], "data_offsets": [0, 1]},
  "h.0.up.weight": {"dtype": "F32", "shape": [32, 8], "data_offsets": [0, 1]},
  "h.0.down.weight": {"dtype": "F32", "shape": [8, 32], "data_offsets": [0, 1]},
  "h.0.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 1]},
  "h.1.up.weight": {"dtype": "F32", "shape": [32, 8], "data_offsets": [0, 1]},
  "h.1.down.weight": {"dtype": "F32", "shape": [8, 32], "data_offsets": [0, 1]},
  "h.1.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 1]}})";

TEST(ModelConfig, ASafetensorsHeaderTellsTheShape) {
  const ModelShape shape = ok(parse_safetensors_header(kHeader));
  EXPECT_EQ(shape.layers, 2u);
  EXPECT_EQ(shape.hidden, 8u);
  EXPECT_DOUBLE_EQ(total_params(shape), 800 + 2 * (256 + 256 + 8));
  EXPECT_DOUBLE_EQ(largest_params(shape), 800);
  EXPECT_EQ(shape.vocab, 100u);
}

TEST(ModelConfig, LayersOfSeveralStacksAreCounted) {
  const ModelShape shape = ok(shape_of({{"encoder.block.0.weight", {8, 8}},
                                        {"encoder.block.1.weight", {8, 8}},
                                        {"decoder.block.0.weight", {8, 8}},
                                        {"shared.weight", {100, 8}}}));
  EXPECT_EQ(shape.layers, 3u);
  EXPECT_EQ(shape.hidden, 8u);
  EXPECT_DOUBLE_EQ(total_params(shape), 3 * 64 + 800);
}

TEST(ModelConfig, WhereNoLayerIsNumberedModulesAreLayers) {
  const ModelShape shape = ok(shape_of({{"fc1.weight", {8, 16}},
                                        {"fc1.bias", {8}},
                                        {"fc2.weight", {4, 8, 3, 3}}}));
  EXPECT_EQ(shape.layers, 2u);
  EXPECT_DOUBLE_EQ(total_params(shape), 8 * 16 + 8 + 4 * 8 * 9);
  EXPECT_DOUBLE_EQ(largest_params(shape), 4 * 8 * 9);
  EXPECT_EQ(ok(shape_of({{"weight", {5}}})).layers, 1u);
  EXPECT_NE(shape_of({}).status().text().find("no tensors"), std::string::npos);
}

TEST(ModelConfig, FilesAndFoldersAreRead) {
  const TempDir folder;
  std::ofstream(folder.path() + "/config.json") << kKnown[0].config;
  EXPECT_EQ(ok(load_model(folder.path())).layers, 12u);
  const std::string path = folder.path() + "/m.safetensors";
  {
    std::ofstream file(path, std::ios::binary);
    const std::uint64_t bytes = std::strlen(kHeader);
    file.write(reinterpret_cast<const char*>(&bytes), sizeof bytes);
    file << kHeader;
  }
  EXPECT_EQ(ok(load_model(path)).layers, 2u);
  std::ofstream(path, std::ios::binary) << "abc";
  EXPECT_NE(load_model(path).status().text().find("does not begin"),
            std::string::npos);
  EXPECT_EQ(load_model(folder.path() + "/none").status().code(),
            Code::kNotFound);
}

}  // namespace
}  // namespace zinf::plan
