// Recurrent layers, for which torch looks at the kind of device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace zinf::emulated {

// aten::lstm.input with the CPU's bits: output, last hidden and cell states.
//
// For float32 without projections the CPU has a kernel for a whole layer
// (oneDNN's), which torch takes only when it sees CPU tensors; elsewhere it
// composes the layer of other operators, and these round differently. Autograd
// knows the kernel, so nothing else is needed here.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(
    const at::Tensor& input, at::TensorList states, at::TensorList weights,
    bool has_biases, std::int64_t num_layers, double dropout, bool train,
    bool bidirectional, bool batch_first);

// One step of the other recurrent layers, whose bits are not the CPU's: here
// torch adds the biases after the products, on the CPU within them. New hidden
// (and cell) state, and an undefined tensor for the kernels' notes.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& from_input, const at::Tensor& from_hidden,
    const at::Tensor& cell, const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias);
std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& from_input, const at::Tensor& from_hidden,
    const at::Tensor& hidden, const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias);

}  // namespace zinf::emulated
