// The C++ half of tests/python/test_cpp.py: a part of a run that moves between
// the languages. It prints what it has loaded, and a hash of the weights.
//   cpp_run LOAD|- SAVE|- STEPS DTYPE NVME [UPDATE MICRO_BATCHES NORM|-]
// With "-" for SAVE it leaves by std::exit, with the engine open.
#include <torch/torch.h>
#include <zinf/zinf.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/model_hash.h"

namespace {

using Arguments = std::vector<std::string>;

zinf::AdamWOptions options_of(const Arguments& arguments) {
  zinf::AdamWOptions options(1e-2);
  if (arguments.size() == 5) return options.max_grad_norm(0.3);
  options.update(arguments[5]).micro_batches(std::stoi(arguments[6]));
  if (arguments[7] != "-") options.max_grad_norm(std::stod(arguments[7]));
  return options;
}

torch::nn::Sequential make_model(torch::ScalarType dtype) {
  torch::nn::Sequential model;
  model->push_back(torch::nn::Linear(8, 16));
  model->push_back(torch::nn::BatchNorm1d(16));
  model->push_back(torch::nn::Linear(16, 4));
  // Not model->to(dtype), which converts integers too, unlike Python's.
  for (auto tensors : {model->parameters(), model->buffers()}) {
    for (auto& tensor : tensors) {
      if (tensor.is_floating_point()) tensor.set_data(tensor.to(dtype));
    }
  }
  return model;
}

void train(const Arguments& arguments) {
  TORCH_CHECK(arguments.size() == 5 || arguments.size() == 8,
              "usage: cpp_run LOAD|- SAVE|- STEPS DTYPE NVME "
              "[UPDATE MICRO_BATCHES NORM|-]");
  auto dtype = arguments[3] == "bfloat16" ? torch::kBFloat16 : torch::kFloat;
  torch::manual_seed(11);
  zinf::Engine engine({.nvme = arguments[4],
                       .weights = "nvme",
                       .states = "nvme",
                       .evict = "always"});
  torch::nn::Sequential model = make_model(dtype);
  engine.adopt(model);
  zinf::AdamWOptions options = options_of(arguments);
  zinf::AdamW optimizer(model->parameters(), options);
  if (arguments[0] != "-") {
    zinf::Loaded loaded = engine.load(arguments[0]);
    std::printf("step %d of %s\n", static_cast<int>(loaded.step),
                loaded.extra.toGenericDict().at("by").toStringRef().c_str());
  }
  for (int i = 0; i < std::stoi(arguments[2]); ++i) {
    for (int micro = 0; micro < options.micro_batches(); ++micro) {
      torch::Tensor x = torch::randn({16, 8}).to(dtype);
      model->forward(x).square().mean().backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  std::printf("weights %016llx\n",
              static_cast<unsigned long long>(zinf::hash_of(*model)));
  if (arguments[1] == "-") std::exit(0);
  c10::Dict<std::string, std::string> extra;
  extra.insert("by", "C++");
  engine.save(arguments[1], extra);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(Arguments(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpp_run: %s\n", error.what());
    return 1;
  }
}
