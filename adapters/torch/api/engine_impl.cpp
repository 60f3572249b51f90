#include "adapters/torch/api/engine_impl.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <exception>
#include <unordered_set>

#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/api/live.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/init_mode.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/probe.h"
#include "adapters/torch/ranks.h"
#include "adapters/torch/share.h"
#include "adapters/torch/training_budget.h"
#include "zinf/engine.h"

namespace zinf {

// C++ tells nobody which tensors were registered as parameters; that they are
// leaves which require gradients tells it too.
static bool is_parameter(const at::Tensor& tensor) {
  return tensor.requires_grad() && tensor.is_leaf();
}

NamedParameters parameters_of(const torch::nn::Module& model) {
  NamedParameters named;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : model.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      named.emplace_back(item.key(), item.value());
    }
  }
  return named;
}

EngineImpl::EngineImpl(const EngineOptions& options)
    : manager_(make_manager(options)),
      rank_(options.comm ? options.comm->rank() : 0),
      num_ranks_(options.comm ? options.comm->size() : 1),
      exceptions_(std::uncaught_exceptions()) {}

EngineImpl::~EngineImpl() = default;

void EngineImpl::tell_of_exception() {
  if (closed_ || std::uncaught_exceptions() <= exceptions_) return;
  if (Ranks* ranks = manager_->ranks()) {
    ranks->fail(Status::error(Code::kInvalid, "an exception has ended it"));
  }
}

void EngineImpl::check_open() const {
  if (closed_) refuse("the engine is closed");
}

void EngineImpl::begin_init() {
  check_open();
  Ranks* ranks = manager_->ranks();
  if (ranks == nullptr) return InitMode::begin(manager_);
  auto same_random = std::make_unique<SameRandom>(*ranks);
  InitMode::begin(manager_, [this](const at::Tensor& born) { on_born(born); });
  same_random_ = std::move(same_random);
}

void EngineImpl::on_born(const at::Tensor& tensor) {
  std::erase_if(born_, [this](const auto& weak) {
    auto impl = weak.lock();
    if (!impl) return true;
    const at::Tensor earlier(std::move(impl));
    if (!is_parameter(earlier)) return false;
    adopt_parameter(manager_, earlier, "parameter", 1, true);
    return true;
  });
  born_.emplace_back(tensor.getIntrusivePtr());
}

void EngineImpl::end_init() {
  std::vector<at::Tensor> parameters = InitMode::born();
  std::erase_if(parameters,
                [](const auto& born) { return !is_parameter(born); });
  for (const at::Tensor& parameter : parameters) {
    if (Unit* unit = Unit::of(parameter)) unit->set_parameter();
  }
  born_.clear();
  InitMode::end();
  same_random_.reset();
  for (const at::Tensor& parameter : parameters) {
    adopt_parameter(manager_, parameter, "parameter", 1, true);
  }
}

void EngineImpl::adopt(torch::nn::Module& model) {
  check_open();
  WeakModule weak = model.weak_from_this();
  if (weak.expired()) {
    refuse(
        "adopt() takes a module that is held by a std::shared_ptr or a module "
        "holder: make it with std::make_shared, or TORCH_MODULE");
  }
  for (const auto& [name, parameter] : parameters_of(model)) {
    std::shared_ptr<Manager> manager = manager_of(parameter);
    if (manager != nullptr && manager != manager_) {
      refuse(name +
             " is managed by another engine: release the model there first");
    }
  }
  for (const auto& module : model.modules()) released_.erase(module);
  std::erase_if(adopted_, [](const auto& known) { return known.expired(); });
  if (std::ranges::none_of(adopted_, [&](const auto& known) {
        return known.lock().get() == &model;
      })) {
    adopted_.push_back(weak);
  }
  share(model);
  adopt_parameters_of(model);
  check_device_memory(*manager_);
}

void EngineImpl::share(const torch::nn::Module& model) {
  Ranks* ranks = manager_->ranks();
  if (ranks == nullptr) return;
  NamedParameters named = parameters_of(model);
  for (const auto& buffer : model.named_buffers()) {
    if (buffer.value().defined()) {
      named.emplace_back(buffer.key(), buffer.value());
    }
  }
  share_tensors(*ranks, named);
}

void EngineImpl::adopt_parameters_of(torch::nn::Module& model) {
  NamedParameters named;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& module : model.named_modules()) {
    if (released_.contains(module.value())) continue;
    for (const auto& own : module.value()->named_parameters(false)) {
      if (!seen.insert(own.value().unsafeGetTensorImpl()).second) continue;
      named.emplace_back(
          module.key().empty() ? own.key() : module.key() + "." + own.key(),
          own.value());
    }
  }
  (void)adopt_parameters(manager_, named);
}

void EngineImpl::refresh(bool all_managed) {
  if (closed_) return;
  // With several ranks init() and adopt() alone split a parameter: all must
  // have its values.
  if (!all_managed && manager_->ranks() == nullptr) {
    for (const auto& model : models()) adopt_parameters_of(*model);
  }
  manager_->adopt_offered();
}

Models EngineImpl::models() const {
  Models known;
  for (const WeakModule& weak : adopted_) {
    if (auto model = weak.lock()) known.push_back(model);
  }
  std::unordered_set<const torch::nn::Module*> inside;
  for (const auto& model : known) {
    for (const auto& child : model->modules(/*include_self=*/false)) {
      inside.insert(child.get());
    }
  }
  std::erase_if(known, [&](const auto& model) {
    return inside.contains(model.get()) || released_.contains(model);
  });
  return known;
}

std::vector<AdamW*> EngineImpl::optimizers() const {
  std::unordered_set<const c10::TensorImpl*> mine;
  for (const auto& model : models()) {
    for (const auto& [name, parameter] : parameters_of(*model)) {
      mine.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::vector<AdamW*> optimizers = live_optimizers();
  std::erase_if(optimizers, [&](AdamW* optimizer) {
    return std::ranges::none_of(
        all_parameters(*optimizer), [&](const at::Tensor& parameter) {
          return mine.contains(parameter.unsafeGetTensorImpl());
        });
  });
  return optimizers;
}

void EngineImpl::release(torch::nn::Module& model) {
  NamedParameters parameters = parameters_of(model);
  if (std::ranges::none_of(parameters, [&](const auto& named) {
        return manager_of(named.second) == manager_;
      })) {
    refuse(
        "this engine does not manage the model: it was never adopted, or "
        "released before");
  }
  std::vector<AdamW*> mine = optimizers();
  try {
    for (const auto& [name, parameter] : parameters) {
      for (AdamW* optimizer : mine) release_state(*optimizer, parameter);
      if (parameter.grad().defined()) release_from_budget(parameter.grad());
      release_from_budget(parameter);
    }
  } catch (const Error&) {
    adopt_parameters_of(model);
    for (const auto& [name, parameter] : parameters) {
      for (AdamW* optimizer : mine) adopt_states(*optimizer, parameter);
    }
    throw;
  }
  for (const auto& module : model.modules()) released_.insert(module);
}

Need EngineImpl::probe(const std::function<void()>& step) {
  if (manager_->ranks() != nullptr) {
    throw Error(Status::error(
        Code::kUnsupported,
        "probe() measures one process: it does not work with several ranks "
        "yet"));
  }
  std::vector<AdamW*> mine = optimizers();
  for (AdamW* optimizer : mine) check_no_step_begun(*optimizer);
  NamedParameters parameters;
  std::vector<at::Tensor> buffers;
  for (const auto& model : models()) {
    for (auto& named : parameters_of(*model)) parameters.push_back(named);
    for (const at::Tensor& buffer : model->buffers()) {
      if (buffer.defined()) buffers.push_back(buffer);
    }
  }
  at::Generator random = at::detail::getDefaultCPUGenerator();
  at::Tensor state = random.get_state();
  std::shared_ptr<Probe> probe = Probe::begin(manager_, parameters, buffers);
  auto end = [&] {
    Need need = probe->end();
    random.set_state(state);
    for (AdamW* optimizer : mine) forget_passes(*optimizer);
    return need;
  };
  try {
    for (AdamW* optimizer : mine) hold_states(*optimizer, *probe);
    step();
    for (AdamW* optimizer : mine) optimizer->step();
  } catch (...) {
    end();
    throw;
  }
  Need need = end();
  probe->check_weights();
  return need;
}

void EngineImpl::close(Ending ending) {
  if (closed_) return;
  try {
    close_manager(*manager_, ending);
  } catch (...) {
    if (manager_->closed()) note_closed();
    throw;
  }
  note_closed();
}

void EngineImpl::note_closed() {
  closed_ = true;
  for (const auto& model : models()) {
    for (const auto& [name, parameter] : parameters_of(*model)) {
      if (manager_of(parameter) == nullptr) release_tensor(parameter);
    }
  }
}

}  // namespace zinf
