#include "adapters/emulated/recurrent.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/RNN.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <vector>

namespace zinf::emulated {
namespace {

constexpr std::int64_t kLstm = 2;  // ideep::rnn_kind::LSTM

bool cpu_takes_whole_layers(const at::Tensor& input, at::TensorList states) {
  return at::globalContext().userEnabledMkldnn() &&
         input.scalar_type() == at::kFloat && input.numel() > 0 &&
         states.size() == 2 && states[0].size(2) == states[1].size(2);
}

at::Tensor biased(const at::Tensor& gates,
                  const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(
    const at::Tensor& input, at::TensorList states, at::TensorList weights,
    bool has_biases, std::int64_t num_layers, double dropout, bool train,
    bool bidirectional, bool batch_first) {
  if (!cpu_takes_whole_layers(input, states)) {
    return at::native::lstm(input, states, weights, has_biases, num_layers,
                            dropout, train, bidirectional, batch_first);
  }
  at::native::check_attributes(input, weights, states);
  at::Tensor hidden = states[0].contiguous();
  at::Tensor cell = states[1].contiguous();
  const std::int64_t num_directions = bidirectional ? 2 : 1;
  const std::size_t num_weights = has_biases ? 4 : 2;
  at::Tensor sequence = batch_first ? input.transpose(0, 1) : input;
  sequence = sequence.contiguous();
  std::vector<at::Tensor> last_hidden;
  std::vector<at::Tensor> last_cell;
  for (std::int64_t layer = 0; layer < num_layers; ++layer) {
    std::vector<at::Tensor> outputs;
    for (std::int64_t direction = 0; direction < num_directions; ++direction) {
      std::int64_t index = layer * num_directions + direction;
      at::TensorList own = weights.slice(index * num_weights, num_weights);
      auto [output, hy, cy, workspace] = at::mkldnn_rnn_layer(
          sequence, own[0], own[1],
          has_biases ? own[2] : at::zeros_like(own[0]),
          has_biases ? own[3] : at::zeros_like(own[1]), hidden[index],
          cell[index], /*reverse=*/direction == 1, /*batch_sizes=*/{}, kLstm,
          hidden.size(2), num_layers, has_biases, bidirectional, batch_first,
          train);
      outputs.push_back(output);
      last_hidden.push_back(hy);
      last_cell.push_back(cy);
    }
    sequence = bidirectional ? at::cat(outputs, -1) : outputs[0];
    if (dropout > 0 && train && layer + 1 < num_layers) {
      sequence = at::dropout(sequence, dropout, /*train=*/true);
    }
  }
  return {batch_first ? sequence.transpose(0, 1) : sequence,
          at::stack(last_hidden), at::stack(last_cell)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& from_input, const at::Tensor& from_hidden,
    const at::Tensor& cell, const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor gates =
      biased(from_input, input_bias) + biased(from_hidden, hidden_bias);
  auto gate = gates.chunk(4, 1);  // in, forget, new, out
  at::Tensor new_cell =
      gate[1].sigmoid() * cell + gate[0].sigmoid() * gate[2].tanh();
  return {gate[3].sigmoid() * new_cell.tanh(), new_cell, at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& from_input, const at::Tensor& from_hidden,
    const at::Tensor& hidden, const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  auto ours = biased(from_input, input_bias).chunk(3, 1);  // reset, update, new
  auto theirs = biased(from_hidden, hidden_bias).chunk(3, 1);
  at::Tensor reset = (ours[0] + theirs[0]).sigmoid();
  at::Tensor update = (ours[1] + theirs[1]).sigmoid();
  at::Tensor fresh = (ours[2] + reset * theirs[2]).tanh();
  return {fresh + update * (hidden - fresh), at::Tensor()};
}

}  // namespace zinf::emulated
