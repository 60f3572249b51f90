#include <ATen/Parallel.h>
#include <ATen/native/ForeachUtils.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "adapters/torch/adam.h"
#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/api/engine_impl.h"
#include "adapters/torch/api/live.h"
#include "adapters/torch/backward.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/probe.h"
#include "adapters/torch/ranks.h"
#include "adapters/torch/split_master.h"
#include "adapters/torch/training_budget.h"
#include "src/base/strf.h"
#include "zinf/thread_pool.h"

namespace zinf {
namespace {

using torch::optim::OptimizerParamGroup;

std::vector<OptimizerParamGroup> one_group(std::vector<at::Tensor> params) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(params));
  return groups;
}

void refresh_engines(const AdamW& optimizer) {
  auto managers = managers_of(all_parameters(optimizer));
  bool all_managed = std::ranges::find(managers, nullptr) == managers.end();
  for (const auto& manager : managers) {
    if (manager == nullptr) continue;
    if (auto engine = engine_of(manager.get())) engine->refresh(all_managed);
  }
}

// As torch.nn.utils.get_total_norm() of Python: the same operators in the same
// order.
at::Tensor total_norm(const std::vector<at::Tensor>& grads) {
  at::native::nested_optional_tensorvec_t nested(1);
  nested[0].assign(grads.begin(), grads.end());
  std::vector<at::Tensor> norms;
  for (const auto& [key, group] :
       at::native::_group_tensors_by_first_tensors_device_and_dtype(
           nested, /*with_indices=*/false)) {
    std::vector<at::Tensor> tensors;
    for (const auto& tensor : group.first[0]) tensors.push_back(*tensor);
    for (at::Tensor& norm : at::_foreach_norm(tensors, 2)) {
      norms.push_back(norm.to(grads[0].device()));
    }
  }
  return at::linalg_vector_norm(at::stack(norms), 2);
}

// What Python's clip_grad_norm_ would multiply by. Note: torch's C++ one
// divides where Python's multiplies by the reciprocal, which may differ in the
// last bit unless the limit is a power of two.
float clip_factor(const std::vector<at::Tensor>& parameters,
                  std::optional<double> max_grad_norm,
                  const std::vector<Ranks*>& ranks) {
  if (!max_grad_norm || parameters.empty()) return 1;
  at::Tensor total;
  if (ranks.empty()) {
    std::vector<at::Tensor> grads;
    for (const at::Tensor& each : parameters) grads.push_back(each.grad());
    total = total_norm(grads);
  } else {
    total =
        at::scalar_tensor(norm_of_slices(*ranks[0], parameters), at::kFloat);
  }
  total = total + 1e-6;
  return at::clamp_max(total.reciprocal() * *max_grad_norm, 1.0).item<float>();
}

// What one rank meets, all are told: they would wait for it.
void tell_ranks(const std::vector<Ranks*>& ranks, const std::string& why) {
  for (Ranks* each : ranks) each->fail(Status::error(Code::kInvalid, why));
}

// Those that a step updates.
std::vector<at::Tensor> due(const AdamW& optimizer,
                            const OptimizerParamGroup& group) {
  bool in_backward = AdamWImpl::of(optimizer).backward != nullptr;
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : group.params()) {
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined() || (in_backward && is_consumed(grad))) continue;
    found.push_back(parameter);
  }
  return found;
}

void probe_step(const AdamW& optimizer, Probe& probe) {
  std::vector<at::Tensor> all_due;
  std::vector<at::Tensor> fresh;
  for (const auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : due(optimizer, group)) {
      if (find_state(optimizer, parameter) == nullptr) {
        fresh.push_back(parameter);
      }
      all_due.push_back(std::move(parameter));
    }
  }
  probe.step(all_due, fresh, is_split(optimizer));
}

// Refuses budgets that cannot work.
void check_budgets(const AdamW& optimizer) {
  const AdamWOptions& options = options_of(optimizer.defaults());
  std::vector<at::Tensor> parameters = all_parameters(optimizer);
  for (const auto& manager : managers_of(parameters)) {
    if (manager == nullptr) continue;
    TrainingPlan plan;
    plan.split = is_split(optimizer);
    plan.waiting =
        options.update() == "step" || options.max_grad_norm().has_value();
    for (const at::Tensor& parameter : parameters) {
      if (manager_of(parameter) != manager) continue;
      plan.parameters.push_back(parameter);
      if (find_state(optimizer, parameter) == nullptr) {
        plan.fresh.push_back(parameter);
      }
    }
    check_training(*manager, plan);
  }
}

void check_type(const at::Tensor& parameter) {
  if (parameter.scalar_type() != at::kFloat && !is_narrow(parameter)) {
    refuse(strf("zinf::AdamW takes float32, bfloat16 and float16, not %s",
                c10::toString(parameter.scalar_type())));
  }
}

void prepare_state(AdamW& optimizer, const at::Tensor& parameter) {
  check_type(parameter);
  AdamWState* state = find_state(optimizer, parameter);
  if (state == nullptr) {
    make_state(optimizer, parameter);
    return;
  }
  if (state->exp_avg.sizes() != shard_of(parameter).sizes()) {
    refuse(
        "a parameter had another shape when its states were made: give the "
        "optimizer a new parameter instead");
  }
  bool has_master = state->split != nullptr || state->master.defined();
  if (is_narrow(parameter) == has_master) return;
  // It has another type than before: a wide weight is its own master.
  state->master = at::Tensor();
  state->split = nullptr;
  if (is_narrow(parameter)) set_master(optimizer, *state, parameter, {});
}

}  // namespace

bool is_split(const AdamW& optimizer) {
  return options_of(optimizer.defaults()).master() == "split";
}

void check_usable(const AdamW& optimizer) {
  const std::string& failure = AdamWImpl::of(optimizer).failure;
  if (failure.empty()) return;
  refuse("weights and states do not fit together (" + failure +
         "): load a good state first, with engine.load() or torch::load()");
}

void heal(AdamW& optimizer) {
  AdamWImpl& impl = AdamWImpl::of(optimizer);
  impl.failure.clear();
  forget_passes(optimizer);
}

void check_no_step_begun(const AdamW& optimizer) {
  const auto& backward = AdamWImpl::of(optimizer).backward;
  if (backward == nullptr || !backward->begun()) return;
  throw Error(Status::error(
      Code::kUnsupported,
      "probe() between backward and step(): call it after step()"));
}

void hold_states(const AdamW& optimizer, Probe& probe) {
  std::vector<at::Tensor> fresh;
  for (const at::Tensor& parameter : all_parameters(optimizer)) {
    if (parameter.requires_grad() &&
        find_state(optimizer, parameter) == nullptr) {
      fresh.push_back(parameter);
    }
  }
  probe.hold_states(fresh, is_split(optimizer));
}

void forget_passes(AdamW& optimizer) {
  const auto& backward = AdamWImpl::of(optimizer).backward;
  if (backward == nullptr) return;
  backward->end_step({});
  for (Ranks* each : ranks_of(optimizer)) each->forget_sums();
}

void prepare(AdamW& optimizer, const std::vector<at::Tensor>& parameters,
             bool check) {
  bool all_have_states = true;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& grad = parameter.grad();
    if (grad.defined() && grad.is_sparse()) {
      throw Error(Status::error(Code::kUnsupported,
                                "zinf::AdamW does not take sparse gradients: "
                                "build the embedding with sparse(false)"));
    }
    all_have_states &= find_state(optimizer, parameter) != nullptr;
  }
  if (check && !all_have_states) check_budgets(optimizer);
  for (const at::Tensor& parameter : parameters) {
    prepare_state(optimizer, parameter);
  }
}

void update(AdamW& optimizer, const AdamOptions& options,
            const std::vector<at::Tensor>& parameters, float clip,
            bool may_wait) {
  std::vector<AdamItem> items;
  for (const at::Tensor& parameter : parameters) {
    AdamWState* state = find_state(optimizer, parameter);
    AdamItem item;
    item.tensors.weight = shard_of(parameter).detach();
    item.tensors.grad = shard_grad_of(parameter);
    item.tensors.exp_avg = state->exp_avg;
    item.tensors.exp_avg_sq = state->exp_avg_sq;
    if (state->master.defined()) item.tensors.master = state->master;
    item.split = state->split;
    item.step = state->step + 1;
    items.push_back(std::move(item));
  }
  throw_if_error(
      adam_update_all(options, /*inverse_scale=*/1, clip, items, may_wait));
  for (const at::Tensor& parameter : parameters) {
    ++find_state(optimizer, parameter)->step;
    if (is_split_over_ranks(parameter)) {
      parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
}

AdamW::AdamW(std::vector<torch::Tensor> params, AdamWOptions defaults)
    : AdamW(one_group(std::move(params)), std::move(defaults)) {}

AdamW::AdamW(const std::vector<OptimizerParamGroup>& param_groups,
             AdamWOptions defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(),
                std::make_unique<AdamWOptions>(std::move(defaults))),
      impl_(std::make_unique<AdamWImpl>()) {
  const AdamWOptions& options = options_of(*defaults_);
  check_options(options);
  if (options.update() == "backward") {
    impl_->backward = make_backward_update(*this);
  }
  for (const auto& group : param_groups) add_param_group(group);
  check_budgets(*this);
  note_optimizer(this);
}

AdamW::~AdamW() { forget_optimizer(this); }

void AdamW::add_param_group(const OptimizerParamGroup& param_group) {
  const AdamWOptions& defaults = options_of(*defaults_);
  AdamWOptions options =
      param_group.has_options()
          ? merged(options_of(param_group.options()), defaults)
          : defaults;
  check_options(options);
  for (const at::Tensor& parameter : param_group.params()) {
    if (parameter.requires_grad()) check_type(parameter);
  }
  if (impl_->backward != nullptr) check_alone(param_group.params());
  Optimizer::add_param_group(OptimizerParamGroup(param_group.params()));
  // Only now: torch puts the defaults in place of options it does not know.
  param_groups_.back().set_options(std::make_unique<AdamWOptions>(options));
  if (impl_->backward != nullptr) {
    watch_gradients(*this, param_groups_.size() - 1);
  }
}

void AdamW::zero_grad(bool set_to_none) {
  Optimizer::zero_grad(set_to_none || impl_->backward != nullptr);
  // What a step has updated already stays, so the step goes on.
  const auto& backward = impl_->backward;
  if (backward != nullptr && backward->begun() && !backward->any_updated()) {
    forget_passes(*this);
  }
}

torch::Tensor AdamW::step(LossClosure closure) {
  at::NoGradGuard no_grad;
  torch::Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode with_grad(true);
    loss = closure();
  }
  check_usable(*this);
  std::vector<AdamOptions> options;
  for (const auto& group : param_groups_) {
    options.push_back(adam_options(group));
  }
  if (impl_->backward != nullptr) impl_->backward->check_options(options);
  if (auto probe = Probe::under_way()) {
    probe_step(*this, *probe);
    return loss;
  }
  const std::vector<Ranks*> ranks = ranks_of(*this);
  refresh_engines(*this);
  try {
    for (Ranks* each : ranks) make_up_passes(*this, *each);
  } catch (const std::exception& error) {
    impl_->failure = error.what();
    throw;
  }
  std::vector<std::vector<at::Tensor>> groups;
  std::vector<at::Tensor> updated;
  for (const auto& group : param_groups_) {
    groups.push_back(due(*this, group));
    updated.insert(updated.end(), groups.back().begin(), groups.back().end());
  }
  prepare(*this, updated);
  const bool together = !updated.empty() || impl_->backward == nullptr;
  // Other ranks count on a step from here on. Alone, nothing is changed before
  // the first update.
  bool begun = !ranks.empty();
  try {
    for (Ranks* each : ranks) {
      if (together) each->begin_step(updated, how_text(*this));
    }
    const auto max_grad_norm = options_of(*defaults_).max_grad_norm();
    const float clip = clip_factor(updated, max_grad_norm, ranks);
    begun = true;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      update(*this, options[i], groups[i], clip, /*may_wait=*/true);
    }
    for (Ranks* each : ranks) {
      if (together) each->end_step(updated);
    }
  } catch (const std::exception& error) {
    if (begun) impl_->failure = error.what();
    tell_ranks(ranks, error.what());
    throw;
  }
  if (impl_->backward != nullptr) impl_->backward->end_step(updated);
  for (Ranks* each : ranks) each->count_step();
  for (const auto& manager : managers_of(all_parameters(*this))) {
    if (manager != nullptr) manager->count_step();
  }
  return loss;
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  // As torch::optim::serialize() does, with whole masters.
  ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>
      states;
  for (const at::Tensor& parameter : all_parameters(*this)) {
    AdamWState* state = find_state(*this, parameter);
    if (state == nullptr) continue;
    auto whole = std::make_unique<AdamWState>(*state);
    if (whole->split != nullptr) {
      whole->master = copy_of_master(*whole, parameter);
      whole->split = nullptr;
    }
    states[parameter.unsafeGetTensorImpl()] = std::move(whole);
  }
  archive.write("pytorch_version", c10::IValue("1.5.0"));
  torch::serialize::OutputArchive inner(archive.compilation_unit());
  torch::optim::detail::serialize<AdamWState>(inner, states);
  archive.write("state", inner);
  torch::serialize::OutputArchive groups(archive.compilation_unit());
  torch::optim::detail::serialize<AdamWOptions>(groups, param_groups_);
  archive.write("param_groups", groups);
  write_slices(*this, archive);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  at::NoGradGuard no_grad;
  check_slices(*this, archive);
  impl_->failure = "torch::load() was not finished";
  state_.clear();
  torch::optim::serialize<AdamWState, AdamWOptions>(archive, *this);
  for (const at::Tensor& parameter : all_parameters(*this)) {
    AdamWState* state = find_state(*this, parameter);
    if (state != nullptr) adopt_loaded_state(*this, *state, parameter);
  }
  heal(*this);
}

}  // namespace zinf
