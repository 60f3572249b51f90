// FNV-1a of the bytes of a model's parameters, as fnv1a() of test_cpp.py.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>

namespace zinf {

inline std::uint64_t hash_of(const torch::nn::Module& model) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const at::Tensor& parameter : model.parameters()) {
    at::Tensor copy = parameter.detach().clone();
    const auto* bytes = static_cast<const unsigned char*>(copy.data_ptr());
    for (std::size_t i = 0; i < copy.nbytes(); ++i) {
      hash = (hash ^ bytes[i]) * 0x100000001B3;
    }
  }
  return hash;
}

}  // namespace zinf
