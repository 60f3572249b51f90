// The C++ half of tests/python/test_cpp.py: a part of a run that moves between
// the languages.
//   cpp_run LOAD|- SAVE|- STEPS DTYPE NVME
// With "-" for SAVE it leaves by std::exit, with the engine open.
#include <torch/torch.h>
#include <zinf/zinf.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

void train(int argc, char** argv) {
  TORCH_CHECK(argc == 6, "usage: cpp_run LOAD|- SAVE|- STEPS DTYPE NVME");
  std::string from = argv[1];
  auto dtype =
      std::string(argv[4]) == "bfloat16" ? torch::kBFloat16 : torch::kFloat;
  torch::manual_seed(11);
  zinf::Engine engine({.nvme = argv[5],
                       .weights = "nvme",
                       .states = "nvme",
                       .evict = "always"});
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
  engine.adopt(model);
  zinf::AdamW optimizer(model->parameters(),
                        zinf::AdamWOptions(1e-2).max_grad_norm(0.3));
  if (from != "-") {
    zinf::Loaded loaded = engine.load(from);
    std::printf("step %d of %s\n", static_cast<int>(loaded.step),
                loaded.extra.toGenericDict().at("by").toStringRef().c_str());
  }
  for (int i = 0; i < std::stoi(argv[3]); ++i) {
    model->forward(torch::randn({16, 8}).to(dtype)).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  if (std::string(argv[2]) == "-") std::exit(0);
  c10::Dict<std::string, std::string> extra;
  extra.insert("by", "C++");
  engine.save(argv[2], extra);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpp_run: %s\n", error.what());
    return 1;
  }
}
