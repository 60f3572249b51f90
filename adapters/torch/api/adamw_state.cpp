#include <torch/serialize/archive.h>

#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/split_master.h"

namespace zinf {
namespace {

at::Tensor in_float(const at::Tensor& tensor, c10::Device device) {
  return tensor.detach().to(tensor.options().device(device).dtype(at::kFloat),
                            /*non_blocking=*/false, /*copy=*/true);
}

bool splits(const AdamW& optimizer, const at::Tensor& kept) {
  const auto& options = static_cast<const AdamWOptions&>(optimizer.defaults());
  return options.master() == "split" && SplitMaster::possible(kept);
}

}  // namespace

bool is_narrow(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kBFloat16 ||
         parameter.scalar_type() == at::kHalf;
}

std::vector<at::Tensor> all_parameters(const AdamW& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

AdamWState* find_state(const AdamW& optimizer, const at::Tensor& parameter) {
  auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return nullptr;
  return static_cast<AdamWState*>(found->second.get());
}

AdamWState& make_state(AdamW& optimizer, const at::Tensor& parameter) {
  auto state = std::make_unique<AdamWState>();
  c10::Device device =
      states_fit_beside(parameter) ? parameter.device() : at::kCPU;
  state->exp_avg = zeros_for(parameter, "exp_avg", device);
  state->exp_avg_sq = zeros_for(parameter, "exp_avg_sq", device);
  if (is_narrow(parameter)) set_master(optimizer, *state, parameter, {});
  AdamWState& made = *state;
  optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  return made;
}

void set_master(const AdamW& optimizer, AdamWState& state,
                const at::Tensor& parameter, const at::Tensor& value) {
  state.master = at::Tensor();
  state.split = nullptr;
  const at::Tensor kept = shard_of(parameter);
  if (splits(optimizer, kept)) {
    state.split = SplitMaster::create(kept);
    if (value.defined()) state.split->join(kept).copy_(value);
    return;
  }
  state.master =
      in_float(value.defined() ? value : kept, state.exp_avg.device());
  adopt_state(parameter, state.master, "master");
}

void adopt_loaded_state(const AdamW& optimizer, AdamWState& state,
                        const at::Tensor& parameter) {
  adopt_state(parameter, state.exp_avg, "exp_avg");
  adopt_state(parameter, state.exp_avg_sq, "exp_avg_sq");
  if (is_narrow(parameter)) {
    set_master(optimizer, state, parameter, at::Tensor(state.master));
  }
}

void drop_state(AdamW& optimizer, const at::Tensor& parameter) {
  optimizer.state().erase(parameter.unsafeGetTensorImpl());
}

void release_state(AdamW& optimizer, const at::Tensor& parameter) {
  AdamWState* state = find_state(optimizer, parameter);
  if (state == nullptr) return;
  if (state->split != nullptr) {
    state->master = state->split->join(shard_of(parameter));
    state->split = nullptr;
  }
  for (const auto& [name, tensor] : tensors_of(*state, parameter)) {
    release_from_budget(tensor);
  }
}

void adopt_states(AdamW& optimizer, const at::Tensor& parameter) {
  AdamWState* state = find_state(optimizer, parameter);
  if (state == nullptr) return;
  adopt_state(parameter, state->exp_avg, "exp_avg");
  adopt_state(parameter, state->exp_avg_sq, "exp_avg_sq");
  if (state->master.defined()) adopt_state(parameter, state->master, "master");
}

at::Tensor copy_of_master(const AdamWState& state,
                          const at::Tensor& parameter) {
  at::Tensor copy = state.split->copy(shard_of(parameter));
  adopt_state(parameter, copy, "master");  // all of them need not fit in memory
  return copy;
}

std::vector<std::pair<std::string, at::Tensor>> tensors_of(
    const AdamWState& state, const at::Tensor& parameter) {
  std::vector<std::pair<std::string, at::Tensor>> tensors = {
      {"exp_avg", state.exp_avg}, {"exp_avg_sq", state.exp_avg_sq}};
  if (state.split != nullptr) {
    tensors.emplace_back("master", state.split->join(shard_of(parameter)));
  } else if (state.master.defined()) {
    tensors.emplace_back("master", state.master);
  }
  return tensors;
}

void AdamWState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step));
  archive.write("exp_avg", exp_avg, /*is_buffer=*/true);
  archive.write("exp_avg_sq", exp_avg_sq, /*is_buffer=*/true);
  if (master.defined()) archive.write("master", master, /*is_buffer=*/true);
}

void AdamWState::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue value;
  archive.read("step", value);
  step = value.toInt();
  archive.read("exp_avg", exp_avg, /*is_buffer=*/true);
  archive.read("exp_avg_sq", exp_avg_sq, /*is_buffer=*/true);
  archive.try_read("master", master, /*is_buffer=*/true);
}

}  // namespace zinf
