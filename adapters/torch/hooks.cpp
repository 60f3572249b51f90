#include "adapters/torch/hooks.h"

#include <ATen/core/VariableHooksInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/pins.h"
#include "adapters/torch/ranks.h"
#include "zinf/log.h"

namespace zinf {
namespace {

using at::TensorBase;

// Torch's own hooks, with set_data() watched.
class DataHooks final : public at::impl::VariableHooksInterface {
 public:
  explicit DataHooks(at::impl::VariableHooksInterface* hooks) : hooks_(hooks) {}

  void set_data(const TensorBase& to, const TensorBase& from) const override {
    std::shared_ptr<Manager> manager;
    Role role = Role::kWeight;
    UnitName name;
    bool is_parameter = false;
    if (to.defined() && to.has_storage()) {
      if (Unit* unit = Unit::of(to.storage().unsafeGetStorageImpl())) {
        manager = unit->manager();
        role = unit->role();
        name = unit->full_name();
        is_parameter = unit->is_parameter();
        unit->settle();
        if (unit->is_watched()) {
          Pins pins;
          pins.take(to, Use::kChange);
        }
      }
    }
    hooks_->set_data(to, from);
    if (!manager) return;
    // `from` still uses the storage: the pointer it may have given out keeps
    // the unit in memory.
    if (!manager->adopt(to, role, name, 2)) {
      manager->offer(to, role, name);
      return;
    }
    if (is_parameter) {
      manager->split(at::Tensor(to), name.parameter);
      Unit* unit = Unit::of(to.storage().unsafeGetStorageImpl());
      unit->set_parameter();
      if (unit->shard() != nullptr) {  // ranks compare what it is set to
        Pins pins;
        pins.take(to, Use::kChange);
      }
    }
  }

  TensorBase tensor_data(const TensorBase& t) const override {
    return hooks_->tensor_data(t);
  }
  TensorBase variable_data(const TensorBase& t) const override {
    return hooks_->variable_data(t);
  }
  const c10::intrusive_ptr<torch::autograd::Node>& grad_fn(
      const TensorBase& t) const override {
    return hooks_->grad_fn(t);
  }
  unsigned _register_hook(
      const TensorBase& t,
      std::function<TensorBase(const TensorBase&)> hook) const override {
    return hooks_->_register_hook(t, std::move(hook));
  }
  void remove_hook(const TensorBase& t, unsigned pos) const override {
    hooks_->remove_hook(t, pos);
  }
  bool is_view(const TensorBase& t) const override {
    return hooks_->is_view(t);
  }
  const TensorBase& base(const TensorBase& t) const override {
    return hooks_->base(t);
  }
  const std::string& name(const TensorBase& t) const override {
    return hooks_->name(t);
  }
  bool is_leaf(const TensorBase& t) const override {
    return hooks_->is_leaf(t);
  }
  std::int64_t output_nr(const TensorBase& t) const override {
    return hooks_->output_nr(t);
  }
  TensorBase data(const TensorBase& t) const override {
    return hooks_->data(t);
  }
  std::int64_t _version(const TensorBase& t) const override {
    return hooks_->_version(t);
  }
  void retain_grad(const TensorBase& t) const override {
    hooks_->retain_grad(t);
  }
  bool retains_grad(const TensorBase& t) const override {
    return hooks_->retains_grad(t);
  }
  void _backward(const at::Tensor& t, at::TensorList inputs,
                 const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph,
                 bool create_graph) const override {
    hooks_->_backward(t, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const TensorBase& t, bool value) const override {
    hooks_->requires_grad_(t, value);
  }
  void basic_autograd_not_implemented_fallback(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys,
      torch::jit::Stack* stack) const override {
    hooks_->basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(
      const TensorBase& t) const override {
    return hooks_->grad_dtype(t);
  }
  void set_grad_dtype(
      const TensorBase& t,
      const std::optional<c10::ScalarType>& dtype) const override {
    hooks_->set_grad_dtype(t, dtype);
  }

 private:
  at::impl::VariableHooksInterface* const hooks_;
};

// Compiled autograd runs no C++ hooks. Before it runs a graph it asks each hook
// for what its graph depends on (`compiled_args`), and the pass's task, which
// is current then, ends when all gradients are there: its callbacks are not
// called, but destroyed.
class GradHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradHook(std::weak_ptr<Manager> manager, const at::Tensor& leaf)
      : manager_(std::move(manager)), leaf_(leaf.getIntrusivePtr()) {}

  bool is_for(const std::shared_ptr<Manager>& manager) const {
    return manager_.lock() == manager;
  }

  void operator()(const torch::autograd::Variable& leaf) override {
    auto manager = manager_.lock();
    if (!manager || manager->closed()) return;
    if (is_split_over_ranks(leaf)) {
      return Unit::of(leaf)->shard()->ranks.reduce(leaf, 0);
    }
    offer(*manager, leaf);
  }

  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs&) const override {
    auto impl = leaf_.lock();
    if (impl == nullptr) return;
    if (is_split_over_ranks(at::Tensor(impl))) {
      throw Error(Status::error(
          Code::kUnsupported,
          "compiled autograd does not run with several ranks: switch it off "
          "with torch._dynamo.config.compiled_autograd = False"));
    }
    auto at_end = std::make_shared<AtEnd>(manager_, leaf_);
    torch::autograd::Engine::get_default_engine().queue_callback([at_end] {});
  }

  // Compiled autograd's graph is the same with it.
  void apply_with_saved(torch::autograd::Variable&,
                        torch::dynamo::autograd::SwapSavedVariables&) override {
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

  static void offer(Manager& manager, const at::Tensor& leaf) {
    const at::Tensor& grad = leaf.grad();
    if (grad.defined()) manager.offer(grad, Role::kGrad, grad_name(leaf));
  }

  class AtEnd {
   public:
    AtEnd(std::weak_ptr<Manager> manager, WeakTensor leaf)
        : manager_(std::move(manager)), leaf_(std::move(leaf)) {}
    AtEnd(const AtEnd&) = delete;
    AtEnd& operator=(const AtEnd&) = delete;
    ~AtEnd() {
      auto manager = manager_.lock();
      auto impl = leaf_.lock();
      if (!manager || manager->closed() || !impl) return;
      try {
        offer(*manager, at::Tensor(impl));
      } catch (const std::exception& error) {  // it stays an ordinary tensor
        log(LogLevel::kWarning, "a gradient is not managed: %s", error.what());
      }
    }

   private:
    const std::weak_ptr<Manager> manager_;
    const WeakTensor leaf_;
  };

  const std::weak_ptr<Manager> manager_;
  const WeakTensor leaf_;
};

}  // namespace

void watch_data_assignments() {
  static const bool once = [] {
    at::impl::SetVariableHooks(new DataHooks(at::impl::GetVariableHooks()));
    return true;
  }();
  (void)once;
}

// What is in `grad` must not be added to: it is the ranks' average.
static void watch_accumulation(const std::shared_ptr<Manager>& manager,
                               const at::Tensor& leaf) {
  Unit* unit = Unit::of(leaf);
  if (unit == nullptr || unit->shard() == nullptr) return;
  if (std::exchange(unit->shard()->watched, true)) return;
  leaf.register_hook(
      [manager = std::weak_ptr(manager),
       weak = c10::weak_intrusive_ptr(leaf.getIntrusivePtr())](at::Tensor) {
        auto known = manager.lock();
        auto impl = weak.lock();
        if (!known || known->closed() || !impl) return;
        known->ranks()->before_gradient(at::Tensor(impl));
      });
}

void watch_gradients(const std::shared_ptr<Manager>& manager,
                     const at::Tensor& leaf) {
  using namespace torch::autograd::impl;
  if (!leaf.is_leaf() || !leaf.requires_grad()) return;
  watch_accumulation(manager, leaf);
  auto& slot = post_acc_grad_hooks(leaf);
  if (slot != nullptr) {
    auto* ours = dynamic_cast<GradHook*>(slot.get());
    if (ours == nullptr || ours->is_for(manager)) return;
  }
  set_post_acc_grad_hooks(leaf, std::make_unique<GradHook>(manager, leaf));
}

void unwatch_gradients(const at::Tensor& leaf) {
  if (torch::autograd::impl::get_autograd_meta(leaf) == nullptr) return;
  auto& slot = torch::autograd::impl::post_acc_grad_hooks(leaf);
  if (dynamic_cast<GradHook*>(slot.get()) != nullptr) slot.reset();
}

}  // namespace zinf
