#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/backward.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/hooks.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/probe.h"
#include "adapters/torch/training_budget.h"

namespace zinf {
namespace {

using torch::autograd::PostAccumulateGradHook;

void update_one(AdamW& optimizer, BackwardUpdate& backward, std::size_t group,
                const at::Tensor& parameter) {
  AdamOptions options = backward.begin_update(
      group, adam_options(optimizer.param_groups().at(group)));
  update(optimizer, options, {parameter}, /*clip=*/1, /*may_wait=*/false);
  backward.end_update(parameter);
}

std::size_t group_of(AdamW& optimizer, const at::Tensor& parameter) {
  const auto& groups = optimizer.param_groups();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (const at::Tensor& its : groups[i].params()) {
      if (its.is_same(parameter)) return i;
    }
  }
  return groups.size();
}

}  // namespace

void update_deferred(AdamW& optimizer,
                     const std::vector<at::Tensor>& deferred) {
  if (Probe::under_way() != nullptr) return;
  at::NoGradGuard no_grad;
  AdamWImpl& impl = AdamWImpl::of(optimizer);
  std::lock_guard lock(impl.updating);
  std::vector<at::Tensor> mine = deferred;
  std::erase_if(mine, [&](const at::Tensor& parameter) {
    return group_of(optimizer, parameter) == optimizer.param_groups().size();
  });
  prepare(optimizer, mine);
  for (const at::Tensor& parameter : mine) {
    update_one(optimizer, *impl.backward, group_of(optimizer, parameter),
               parameter);
  }
}

namespace {

// The parameter of one group of an optimizer, which is there while `update` is.
class UpdateHook final : public PostAccumulateGradHook {
 public:
  UpdateHook(AdamW& optimizer, std::size_t group,
             std::unique_ptr<PostAccumulateGradHook> before)
      : optimizer_(optimizer),
        update_(AdamWImpl::of(optimizer).backward),
        group_(group),
        before_(std::move(before)) {}

  void operator()(const at::Tensor& parameter) override {
    if (before_ != nullptr) (*before_)(parameter);
    if (auto update = update_.lock()) {
      on_gradient(*update, parameter);
    } else if (Unit::of(parameter) != nullptr) {
      offer_gradient(parameter);
    }
  }

  bool ended() const { return update_.expired(); }
  std::unique_ptr<PostAccumulateGradHook> take_before() {
    return std::move(before_);
  }

 private:
  void on_gradient(BackwardUpdate& backward, const at::Tensor& parameter) {
    at::NoGradGuard no_grad;
    std::lock_guard lock(AdamWImpl::of(optimizer_).updating);
    check_usable(optimizer_);
    bool waits = options_of(optimizer_.defaults()).max_grad_norm().has_value();
    if (!backward.on_gradient(parameter, waits)) return;
    bool split = is_split(optimizer_);
    bool is_fresh = find_state(optimizer_, parameter) == nullptr;
    bool at_once =
        !parameter.is_cpu() || update_bytes(parameter, split).weight_stays;
    std::shared_ptr<Probe> probe = Probe::under_way();
    if (probe != nullptr && at_once) {
      probe->update(parameter, is_fresh, split);
      backward.end_update(parameter);
      return;
    }
    if (probe != nullptr || (is_fresh && !at_once)) {
      check_first_update(parameter, split);
      backward.defer(parameter);
      return;
    }
    prepare(optimizer_, {parameter}, /*check=*/false);
    update_one(optimizer_, backward, group_, parameter);
  }

  AdamW& optimizer_;
  const std::weak_ptr<BackwardUpdate> update_;
  const std::size_t group_;
  std::unique_ptr<PostAccumulateGradHook> before_;  // of somebody else
};

// Torch has one place per tensor.
std::unique_ptr<PostAccumulateGradHook> take_hook(const at::Tensor& parameter) {
  unwatch_gradients(parameter);  // ours offers them too
  std::unique_ptr<PostAccumulateGradHook> hook =
      std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
  for (auto* ours = dynamic_cast<UpdateHook*>(hook.get());
       ours != nullptr && ours->ended();
       ours = dynamic_cast<UpdateHook*>(hook.get())) {
    hook = ours->take_before();
  }
  return hook;
}

}  // namespace

std::shared_ptr<BackwardUpdate> make_backward_update(AdamW& optimizer) {
  return std::make_shared<BackwardUpdate>(
      options_of(optimizer.defaults()).micro_batches(),
      [&optimizer](const std::vector<at::Tensor>& deferred) {
        update_deferred(optimizer, deferred);
      },
      [&optimizer](const std::string& why) {
        AdamWImpl::of(optimizer).failure = why;
        for (const auto& manager : managers_of(all_parameters(optimizer))) {
          if (manager != nullptr) manager->fail(why);
        }
      },
      [&optimizer] { return how_text(optimizer); });
}

void check_alone(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.is_leaf() || !parameter.requires_grad()) continue;
    auto* hook = dynamic_cast<UpdateHook*>(
        torch::autograd::impl::post_acc_grad_hooks(parameter).get());
    if (hook == nullptr || hook->ended()) continue;
    refuse(
        "another optimizer with update=\"backward\" has one of these "
        "parameters: a gradient is used once, so destroy that optimizer "
        "first");
  }
}

void watch_gradients(AdamW& optimizer, std::size_t group) {
  for (const at::Tensor& parameter : optimizer.param_groups()[group].params()) {
    if (!parameter.is_leaf() || !parameter.requires_grad()) continue;
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameter,
        std::make_unique<UpdateHook>(optimizer, group, take_hook(parameter)));
  }
}

}  // namespace zinf
