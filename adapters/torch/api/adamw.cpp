#include <ATen/Parallel.h>
#include <ATen/native/ForeachUtils.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "adapters/torch/adam.h"
#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/api/engine_impl.h"
#include "adapters/torch/api/live.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/split_master.h"
#include "adapters/torch/training_budget.h"
#include "src/base/strf.h"
#include "zinf/thread_pool.h"

namespace zinf {
namespace {

using torch::optim::OptimizerParamGroup;

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Status::error(Code::kInvalid, text));
}

void check_options(const AdamWOptions& options) {
  if (options.update() != "step") {
    refuse("update is \"" + options.update() + "\", must be \"step\"");
  }
  if (options.master() != "split" && options.master() != "plain") {
    refuse("master is \"" + options.master() +
           "\", must be \"split\" or \"plain\"");
  }
  std::optional<double> norm = options.max_grad_norm();
  if (norm && !(*norm > 0)) {
    refuse(strf("max_grad_norm is %g, must be positive", *norm));
  }
  using Named = std::pair<const char*, double>;
  for (const auto& [name, value] :
       {Named("lr", options.lr()), Named("eps", options.eps()),
        Named("weight_decay", options.weight_decay())}) {
    if (!(value >= 0))
      refuse(strf("%s is %g, must not be negative", name, value));
  }
  auto [beta1, beta2] = options.betas();
  for (double beta : {beta1, beta2}) {
    if (!(beta >= 0 && beta < 1)) {
      refuse(strf("betas are (%g, %g), must be in [0, 1)", beta1, beta2));
    }
  }
}

// A group's options: what was not set is the optimizer's.
AdamWOptions merged(const AdamWOptions& group, const AdamWOptions& defaults) {
  const AdamWOptions unset;
  AdamWOptions options = defaults;
  if (group.lr() != unset.lr()) options.lr(group.lr());
  if (group.betas() != unset.betas()) options.betas(group.betas());
  if (group.eps() != unset.eps()) options.eps(group.eps());
  if (group.weight_decay() != unset.weight_decay()) {
    options.weight_decay(group.weight_decay());
  }
  if ((group.max_grad_norm() &&
       group.max_grad_norm() != defaults.max_grad_norm()) ||
      (group.master() != unset.master() &&
       group.master() != defaults.master()) ||
      (group.update() != unset.update() &&
       group.update() != defaults.update())) {
    refuse(
        "max_grad_norm, update and master are the optimizer's: a parameter "
        "group cannot have its own");
  }
  return options;
}

const AdamWOptions& options_of(const torch::optim::OptimizerOptions& options) {
  auto* ours = dynamic_cast<const AdamWOptions*>(&options);
  if (ours == nullptr) {
    refuse(
        "a parameter group of zinf::AdamW has zinf::AdamWOptions, not "
        "another optimizer's");
  }
  return *ours;
}

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
float clip_factor(const std::vector<at::Tensor>& grads,
                  std::optional<double> max_grad_norm) {
  if (!max_grad_norm || grads.empty()) return 1;
  at::Tensor total = total_norm(grads) + 1e-6;
  return at::clamp_max(total.reciprocal() * *max_grad_norm, 1.0).item<float>();
}

std::vector<at::Tensor> with_grads(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) found.push_back(parameter);
  }
  return found;
}

// Refuses budgets that cannot work.
void check_budgets(const AdamW& optimizer) {
  std::vector<at::Tensor> parameters = all_parameters(optimizer);
  for (const auto& manager : managers_of(parameters)) {
    if (manager == nullptr) continue;
    TrainingPlan plan;
    plan.split = options_of(optimizer.defaults()).master() == "split";
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

// Everything that can be refused, before anything is changed.
void prepare(AdamW& optimizer, const std::vector<at::Tensor>& parameters) {
  if (std::ranges::any_of(parameters, [&](const at::Tensor& parameter) {
        return find_state(optimizer, parameter) == nullptr;
      })) {
    check_budgets(optimizer);
  }
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().is_sparse()) {
      throw Error(Status::error(Code::kUnsupported,
                                "zinf::AdamW does not take sparse gradients: "
                                "build the embedding with sparse(false)"));
    }
  }
  for (const at::Tensor& parameter : parameters) {
    if (find_state(optimizer, parameter) == nullptr) {
      make_state(optimizer, parameter);
    }
  }
}

ThreadPool* pool_of(AdamWImpl& impl) {
  int threads = at::get_num_threads();
  if (impl.pool == nullptr || impl.pool->threads() != threads) {
    Result<std::unique_ptr<ThreadPool>> made = ThreadPool::create(threads);
    throw_if_error(made.status());
    impl.pool = std::move(made).value();
  }
  return impl.pool.get();
}

void update_group(AdamW& optimizer, const OptimizerParamGroup& group,
                  float clip) {
  const AdamWOptions& options = options_of(group.options());
  auto [beta1, beta2] = options.betas();
  AdamOptions adam = {.lr = options.lr(),
                      .beta1 = beta1,
                      .beta2 = beta2,
                      .eps = options.eps(),
                      .weight_decay = options.weight_decay(),
                      .decay = WeightDecay::kDecoupled};
  std::vector<AdamItem> items;
  std::vector<AdamWState*> states;
  for (const at::Tensor& parameter : with_grads(group.params())) {
    AdamWState* state = find_state(optimizer, parameter);
    AdamItem item;
    item.tensors.weight = parameter.detach();
    item.tensors.grad = parameter.grad();
    item.tensors.exp_avg = state->exp_avg;
    item.tensors.exp_avg_sq = state->exp_avg_sq;
    if (state->master.defined()) item.tensors.master = state->master;
    item.split = state->split;
    item.step = state->step + 1;
    items.push_back(std::move(item));
    states.push_back(state);
  }
  throw_if_error(adam_update_all(adam, /*inverse_scale=*/1, clip, items,
                                 pool_of(AdamWImpl::of(optimizer))));
  for (AdamWState* state : states) ++state->step;
}

}  // namespace

AdamW::AdamW(std::vector<torch::Tensor> params, AdamWOptions defaults)
    : AdamW(one_group(std::move(params)), std::move(defaults)) {}

AdamW::AdamW(const std::vector<OptimizerParamGroup>& param_groups,
             AdamWOptions defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(),
                std::make_unique<AdamWOptions>(std::move(defaults))),
      impl_(std::make_unique<AdamWImpl>()) {
  check_options(options_of(*defaults_));
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
  Optimizer::add_param_group(OptimizerParamGroup(param_group.params()));
  // Only now: torch puts the defaults in place of options it does not know.
  param_groups_.back().set_options(std::make_unique<AdamWOptions>(options));
}

torch::Tensor AdamW::step(LossClosure closure) {
  at::NoGradGuard no_grad;
  torch::Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode with_grad(true);
    loss = closure();
  }
  if (!impl_->failure.empty()) {
    throw Error(Status::error(
        Code::kInvalid, "weights and states do not fit together (" +
                            impl_->failure +
                            "): load a good state first, with engine.load() "
                            "or torch::load()"));
  }
  refresh_engines(*this);
  std::vector<at::Tensor> updated = with_grads(all_parameters(*this));
  prepare(*this, updated);
  std::vector<at::Tensor> grads;
  for (const at::Tensor& parameter : updated) grads.push_back(parameter.grad());
  float clip = clip_factor(grads, options_of(*defaults_).max_grad_norm());
  grads.clear();
  try {
    for (const auto& group : param_groups_) update_group(*this, group, clip);
  } catch (const std::exception& error) {
    impl_->failure = error.what();
    throw;
  }
  for (const auto& manager : managers_of(updated)) {
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
      whole->master = std::exchange(whole->split, nullptr)->join(parameter);
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
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  at::NoGradGuard no_grad;
  impl_->failure = "torch::load() was not finished";
  state_.clear();
  torch::optim::serialize<AdamWState, AdamWOptions>(archive, *this);
  for (const at::Tensor& parameter : all_parameters(*this)) {
    AdamWState* state = find_state(*this, parameter);
    if (state != nullptr) adopt_loaded_state(*this, *state, parameter);
  }
  impl_->failure.clear();
}

void AdamWOptions::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("lr", c10::IValue(lr_));
  archive.write("betas", c10::IValue(betas_));
  archive.write("eps", c10::IValue(eps_));
  archive.write("weight_decay", c10::IValue(weight_decay_));
}

void AdamWOptions::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue value;
  archive.read("lr", value);
  lr_ = value.toDouble();
  archive.read("betas", value);
  betas_ = value.to<Betas>();
  archive.read("eps", value);
  eps_ = value.toDouble();
  archive.read("weight_decay", value);
  weight_decay_ = value.toDouble();
}

}  // namespace zinf
