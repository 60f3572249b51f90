#include "adapters/torch/backward.h"

#include <torch/csrc/autograd/engine.h>

#include <array>
#include <exception>
#include <utility>

#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/ranks.h"
#include "adapters/torch/unit.h"
#include "zinf/log.h"

namespace zinf {
namespace {

[[noreturn]] void refuse_use(const std::string& text) {
  throw Error(Status::error(Code::kUnsupported, text));
}

// The first option that differs, or null.
const char* difference(const AdamOptions& a, const AdamOptions& b) {
  using Field = std::pair<const char*, double AdamOptions::*>;
  static constexpr std::array<Field, 5> kFields = {
      {{"lr", &AdamOptions::lr},
       {"beta1", &AdamOptions::beta1},
       {"beta2", &AdamOptions::beta2},
       {"eps", &AdamOptions::eps},
       {"weight_decay", &AdamOptions::weight_decay}}};
  for (const auto& [name, field] : kFields) {
    if (a.*field != b.*field) return name;
  }
  return nullptr;
}

}  // namespace

// Called by autograd at the end of a backward pass, or only dropped when an
// exception ended it. Compiled autograd drops it in both cases.
class BackwardUpdate::Pass {
 public:
  explicit Pass(std::weak_ptr<BackwardUpdate> update)
      : update_(std::move(update)) {}
  ~Pass() {
    try {
      leave(compiled_ && std::uncaught_exceptions() == exceptions_);
    } catch (const std::exception& error) {
      log(LogLevel::kError, "the end of a backward pass: %s", error.what());
    }
  }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  void leave(bool whole) {
    if (auto update = std::exchange(update_, {}).lock()) {
      update->leave_pass(whole);
    }
  }

 private:
  std::weak_ptr<BackwardUpdate> update_;
  // Autograd itself calls hooks of gradients inside a node.
  const bool compiled_ = torch::autograd::get_current_node() == nullptr;
  const int exceptions_ = std::uncaught_exceptions();
};

void BackwardUpdate::enter_pass() {
  std::shared_ptr<Pass> pass;
  {
    std::lock_guard lock(mutex_);
    if (!pass_.expired()) return;
    pass = std::make_shared<Pass>(weak_from_this());
    pass_ = pass;
    changed_ = false;
  }
  torch::autograd::Engine::get_default_engine().queue_callback(
      [pass] { pass->leave(true); });
}

void BackwardUpdate::leave_pass(bool whole) {
  std::vector<at::Tensor> deferred;
  {
    std::lock_guard lock(mutex_);
    pass_.reset();
    deferred.swap(deferred_);
  }
  try {
    if (whole && !deferred.empty()) update_(deferred);
  } catch (...) {
    fail_if_changed();
    throw;
  }
  if (!whole) return fail_if_changed();
  std::lock_guard lock(mutex_);
  ++passes_;
}

void BackwardUpdate::fail_if_changed() {
  {
    std::lock_guard lock(mutex_);
    if (!changed_) return;
  }
  fail_(
      "an exception inside backward left some weights updated and others not");
}

void BackwardUpdate::defer(const at::Tensor& parameter) {
  offer_gradient(parameter);
  std::lock_guard lock(mutex_);
  deferred_.push_back(parameter);
}

bool BackwardUpdate::on_gradient(const at::Tensor& parameter, bool waits) {
  enter_pass();
  bool last = false;
  {
    std::lock_guard lock(mutex_);
    if (passes_ >= micro_batches_ ||
        updated_.contains(WeakTensor(parameter.getIntrusivePtr()))) {
      refuse_use(
          "a second backward before step(): with update=\"backward\" say how "
          "many there are, zinf.AdamW(..., micro_batches=" +
          std::to_string(passes_ + 1) + ")");
    }
    last = passes_ + 1 == micro_batches_;
  }
  Unit* unit = Unit::of(parameter);
  if (unit == nullptr) return false;
  if (unit->shard() != nullptr) {
    Ranks& ranks = unit->shard()->ranks;
    if (last && !waits) ranks.update_inside(update_, how_);
    ranks.reduce(parameter, waits ? 0 : micro_batches_);
    return false;
  }
  if (!last || waits) offer_gradient(parameter);
  return last && !waits;
}

// Outside of backward step() holds them.
void BackwardUpdate::hold_interrupts() {
  {
    std::lock_guard lock(mutex_);
    if (!hold_.expired() || torch::autograd::get_current_graph_task_id() < 0) {
      return;
    }
  }
  auto hold = std::make_shared<HoldInterrupts>();
  // The last callback of the pass: others make updates too.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [hold] { hold->end(); });
  std::lock_guard lock(mutex_);
  hold_ = hold;
}

void BackwardUpdate::watch(const at::Tensor& leaf) {
  leaf.register_hook(
      [update = weak_from_this(),
       weak = c10::weak_intrusive_ptr(leaf.getIntrusivePtr())](at::Tensor) {
        auto known = update.lock();
        auto impl = weak.lock();
        if (known && impl) known->before_gradient(at::Tensor(impl));
      });
}

void BackwardUpdate::before_gradient(const at::Tensor& leaf) {
  if (!interrupted()) return;
  // Used gradients are left when the interrupt came before zero_grad().
  bool unfinished = leaf.grad().defined() && is_consumed(leaf.grad());
  {
    std::lock_guard lock(mutex_);
    if (!pass_.expired()) return;
    unfinished = unfinished || (passes_ > 0 && !updated_.empty());
  }
  if (unfinished) finish_();
}

std::vector<AdamOptions> BackwardUpdate::fixed_options(
    std::vector<AdamOptions> groups) const {
  std::lock_guard lock(mutex_);
  for (const auto& [group, used] : fixed_) groups.at(group) = used;
  return groups;
}

bool BackwardUpdate::interrupted() const {
  std::lock_guard lock(mutex_);
  return interrupts_ && interrupts_->seen();
}

AdamOptions BackwardUpdate::begin_update(std::size_t group,
                                         const AdamOptions& options) {
  hold_interrupts();
  std::lock_guard lock(mutex_);
  if (!interrupts_) interrupts_.emplace();
  if (updated_.empty() && !changed_) interrupts_->restart();
  changed_ = true;
  return fixed_.try_emplace(group, options).first->second;
}

void BackwardUpdate::end_update(const at::Tensor& parameter) {
  consume_gradient(parameter);
  std::lock_guard lock(mutex_);
  updated_.emplace(parameter.getIntrusivePtr());
}

bool BackwardUpdate::begun() const {
  std::lock_guard lock(mutex_);
  return passes_ > 0;
}

bool BackwardUpdate::any_updated() const {
  std::lock_guard lock(mutex_);
  return !updated_.empty();
}

void BackwardUpdate::check_options(
    const std::vector<AdamOptions>& groups) const {
  std::lock_guard lock(mutex_);
  for (const auto& [group, before] : fixed_) {
    if (const char* changed = difference(groups.at(group), before)) {
      refuse_use(std::string(changed) +
                 " was changed between backward and step(), but the weights "
                 "are updated already (update=\"backward\"): set it back, "
                 "call step(), then change it");
    }
  }
}

void BackwardUpdate::end_step(const std::vector<at::Tensor>& updated) {
  for (const at::Tensor& parameter : updated) {
    if (Unit::of(parameter) != nullptr) consume_gradient(parameter);
  }
  std::lock_guard lock(mutex_);
  updated_.clear();
  fixed_.clear();
  passes_ = 0;
}

}  // namespace zinf
