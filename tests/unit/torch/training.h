// A small model in C++, and how the tests train it.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <zinf/zinf.h>

#include <string>
#include <vector>

namespace zinf {

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int width = 24) {
    first = register_module("first", torch::nn::Linear(8, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    second = register_module("second", torch::nn::Linear(width, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return second(torch::dropout(torch::relu(norm(first(x))), 0.1, true));
  }
  torch::nn::Linear first = nullptr, second = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(Net);

inline Net make_net(Engine* engine = nullptr) {
  torch::manual_seed(7);
  if (engine == nullptr) return Net();
  Net net = nullptr;
  {
    auto init = engine->init();
    net = Net();
  }
  engine->adopt(net);
  return net;
}

inline void backward(Net& net, torch::ScalarType dtype = torch::kFloat) {
  torch::Tensor x = torch::randn({16, 8}).to(dtype);
  net(x).square().mean().backward();
}

inline void train(Net& net, torch::optim::Optimizer& optimizer, int steps) {
  for (int i = 0; i < steps; ++i) {
    backward(net, net->first->weight.scalar_type());
    optimizer.step();
    optimizer.zero_grad();
  }
}

// Copies of all parameters and buffers.
inline std::vector<torch::Tensor> contents(const torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> all;
  for (const auto& tensor : module.parameters()) all.push_back(tensor.clone());
  for (const auto& tensor : module.buffers()) all.push_back(tensor.clone());
  return all;
}

inline void copy_contents(const torch::nn::Module& from,
                          const torch::nn::Module& to) {
  torch::NoGradGuard no_grad;
  auto buffers = to.buffers();
  auto parameters = to.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].copy_(from.parameters()[i]);
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    buffers[i].copy_(from.buffers()[i]);
  }
}

inline bool same_bits(const std::vector<torch::Tensor>& a,
                      const std::vector<torch::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return true;
}

inline EngineOptions on_nvme(const std::string& path) {
  return {.nvme = path,
          .weights = "nvme",
          .states = "nvme",
          .evict = "always",
          .audit = true};
}

// What a call throws, or "".
template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline testing::AssertionResult says(const std::string& text,
                                     const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" lacks " << part;
}

}  // namespace zinf
