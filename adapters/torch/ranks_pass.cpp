// Gradients between ranks: Note [Passes of ranks] in ranks.h.
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "adapters/torch/adam.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/pins.h"
#include "adapters/torch/ranks.h"
#include "src/base/strf.h"
#include "zinf/log.h"

namespace zinf {
namespace {

// Gradients that are on their way: a pass waits where there are more.
constexpr std::uint64_t kSentBytes = std::uint64_t{128} << 20;

constexpr const char* kBackward = "a backward pass";
constexpr const char* kStep = "step()";

template <typename T>
void add_to(float* sum, const std::byte* part, std::int64_t count, bool first) {
  const T* values = reinterpret_cast<const T*>(part);
  if (first) {
    for (std::int64_t i = 0; i < count; ++i)
      sum[i] = static_cast<float>(values[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i)
      sum[i] += static_cast<float>(values[i]);
  }
}

void add_tensor(at::Tensor& sum, const at::Tensor& term) {
  add_to<float>(sum.mutable_data_ptr<float>(),
                static_cast<const std::byte*>(term.const_data_ptr()),
                term.numel(), /*first=*/false);
}

// grad = sum * scale, or grad += that: each as torch would round it.
template <typename T>
void average(const float* sum, float scale, T* grad, std::int64_t count,
             bool add) {
  for (std::int64_t i = 0; i < count; ++i) {
    T value = static_cast<T>(sum[i] * scale);
    grad[i] = add ? static_cast<T>(static_cast<float>(grad[i]) +
                                   static_cast<float>(value))
                  : value;
  }
}

template <typename Body>
void with_type(at::ScalarType type, const Body& body) {
  switch (type) {
    case at::kFloat:
      return body(float{});
    case at::kBFloat16:
      return body(c10::BFloat16{});
    case at::kHalf:
      return body(c10::Half{});
    default:
      throw Error(Status::error(
          Code::kUnsupported,
          std::string("gradients of type ") + c10::toString(type) +
              " cannot be averaged over ranks: float32, bfloat16 and float16 "
              "can"));
  }
}

Shard* find_shard(const at::Tensor& parameter) {
  Unit* unit = Unit::of(parameter);
  return unit == nullptr ? nullptr : unit->shard().get();
}

}  // namespace

// Called by autograd at the end of a backward pass, or only dropped when an
// exception ended it.
class Ranks::Pass {
 public:
  explicit Pass(std::shared_ptr<Manager> manager)
      : manager_(std::move(manager)) {}
  ~Pass() {
    if (manager_ != nullptr) manager_->ranks()->abandon_pass();
  }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  void end() {
    manager_->ranks()->leave_pass();
    manager_.reset();
  }

 private:
  std::shared_ptr<Manager> manager_;
};

void Ranks::enter_pass() {
  if (!pass_.expired()) return;
  auto pass = std::make_shared<Pass>(manager_.shared_from_this());
  pass_ = pass;
  updater_ = std::this_thread::get_id();
  torch::autograd::Engine::get_default_engine().queue_callback(
      [pass] { pass->end(); });
}

void Ranks::end_thread() {
  updater_ = std::thread::id();
  pass_device_ = kNoDevice;
}

void Ranks::before_gradient(const at::Tensor& parameter) {
  Unit* unit = Unit::of(parameter);
  if (unit == nullptr || unit->shard() == nullptr) return;
  const std::shared_ptr<Shard>& shard = unit->shard();
  check_device(parameter);
  enter_pass();
  shard->set_parameter(parameter);
  if (!seen_.insert(shard).second) return;  // another type had a hook too
  at::Tensor& grad = parameter.mutable_grad();
  if (grad.defined()) {
    Unit* whole = Unit::of(grad);
    const bool ours = whole != nullptr && whole->shard() == shard;
    if (ours) aside_[shard] = std::exchange(grad, at::Tensor());
    return;
  }
  release_kept(*shard);
}

// Autograd has a thread for each device, and a pass is one thread's.
void Ranks::check_device(const at::Tensor& parameter) {
  const int own = static_cast<int>(parameter.device().type());
  int first = kNoDevice;
  if (pass_device_.compare_exchange_strong(first, own) || first == own) return;
  refuse_pass(Unit::of(parameter)->name() + " is on " +
              parameter.device().str() +
              ", other parameters are not: over several ranks a model must be "
              "on one device");
}

void Ranks::release_kept(Shard& shard) {
  auto impl = shard.whole_grad.lock();
  if (!impl) return;
  at::Tensor kept(impl);
  Unit* whole = Unit::of(kept);
  if (whole != nullptr && whole->shard().get() == &shard) release_tensor(kept);
}

void Ranks::refuse_pass(const std::string& why) {
  Status status = Status::error(Code::kUnsupported, why);
  fail(status);
  throw Error(status);
}

void Ranks::reduce(const at::Tensor& parameter, std::int64_t passes) {
  std::shared_ptr<Shard> shard = Unit::of(parameter)->shard();
  if (world_ && !std::has_single_bit(static_cast<std::uint64_t>(passes))) {
    refuse_pass(
        "deterministic=\"world\" sums over the micro-batches of a step: train "
        "with zinf.AdamW(update=\"backward\", micro_batches=...), a power of "
        "two, and without max_grad_norm");
  }
  if (!seen_.contains(shard)) before_gradient(parameter);
  seen_.erase(shard);
  at::Tensor grad = std::exchange(parameter.mutable_grad(), at::Tensor());
  if (!grad.defined()) return;
  if (grad.is_sparse()) {
    refuse_pass(shard->name +
                " has a sparse gradient: build the embedding with "
                "sparse=False");
  }
  if (!reduced_.insert(shard).second) {
    refuse_pass(shard->name +
                " has two gradients in one backward pass: with activation "
                "checkpointing choose use_reentrant=False");
  }
  c10::AutoGradMode no_grad(false);
  grad = matching(grad.detach(), parameter.detach());
  if (grad.is_cpu()) {
    send(*shard, parameter, grad);
  } else {
    send_from_device(shard, std::move(grad));
  }
  if (update_) update_ready();
}

// It is on its way to the host while the device computes those after it.
void Ranks::send_from_device(const std::shared_ptr<Shard>& shard,
                             at::Tensor grad) {
  constexpr std::size_t kUnderWay = 2;
  with_type(grad.scalar_type(), [](auto) {});
  manager_.reap();
  // Autograd has it too. Another name than that of this rank's slice.
  manager_.adopt(
      grad, Role::kGrad,
      {shard->name + " of this rank", std::string(role_name(Role::kGrad))},
      /*tensors=*/2);
  Unit* unit = Unit::of(grad);
  const bool whole = unit != nullptr && unit->bytes() == grad.nbytes();
  if (!whole) return send(*shard, shard->parameter(), grad.cpu());
  unit->send_to_host();
  leaving_.emplace_back(shard, std::move(grad));
  while (leaving_.size() > kUnderWay) send_next();
}

void Ranks::send_next() {
  auto [shard, grad] = std::move(leaving_.front());
  leaving_.pop_front();
  wait_for_sent(kSentBytes);
  Result<Pin> pin = Unit::of(grad)->pin_on_host(Use::kRead);
  throw_if_error(pin.status());
  sent_bytes_ += grad.nbytes();
  auto move = gather_->exchange().push(shard->grad_unit, number_, pin->bytes());
  sent_.push_back({std::move(grad), std::move(pin).value(), std::move(move)});
}

void Ranks::send(Shard& shard, const at::Tensor& parameter,
                 const at::Tensor& grad) {
  with_type(parameter.scalar_type(), [](auto) {});
  wait_for_sent(kSentBytes);
  Pins pins;
  pins.take(grad, Use::kRead);
  std::span<const std::byte> bytes{
      static_cast<const std::byte*>(grad.const_data_ptr()), grad.nbytes()};
  auto move = gather_->exchange().push(shard.grad_unit, number_, bytes);
  // A managed gradient may leave memory when the pin ends.
  if (Unit::of(grad) != nullptr) {
    throw_if_failed(move->wait());
    return;
  }
  sent_bytes_ += bytes.size();
  sent_.push_back({grad, {}, std::move(move)});
}

void Ranks::wait_for_sent(std::uint64_t most_bytes) {
  while (!sent_.empty() &&
         (sent_bytes_ > most_bytes || sent_.front().move->done())) {
    Sent sent = std::move(sent_.front());
    sent_.pop_front();
    sent_bytes_ -= sent.grad.nbytes();
    throw_if_failed(sent.move->wait());
  }
}

Status Ranks::add_part(const PartName& part, std::span<const std::byte> bytes) {
  auto shard = shard_of_unit(part.unit);
  if (shard == nullptr) {
    return Status::error(Code::kInvalid,
                         "a gradient has come for a parameter that is gone");
  }
  c10::AutoGradMode no_grad(false);
  std::lock_guard lock(shard->mutex);
  const bool first = world_ || !shard->sum.defined();
  const auto count = static_cast<std::int64_t>(shard->mine.size());
  try {
    if (first) shard->sum = at::zeros({sum_elements(*shard)}, at::kFloat);
    with_type(shard->weight.scalar_type(), [&](auto zero) {
      add_to<decltype(zero)>(shard->sum.mutable_data_ptr<float>(), bytes.data(),
                             count, first);
    });
    if (world_) {
      const std::uint64_t micro_batch =
          (part.pass - step_begin_) * static_cast<std::uint64_t>(size()) +
          static_cast<std::uint64_t>(part.rank);
      shard->tree.add(micro_batch, std::exchange(shard->sum, at::Tensor()),
                      add_tensor);
    }
  } catch (const std::exception& error) {
    return Status::error(Code::kOverBudget, error.what()).in(shard->name);
  }
  return {};
}

Status Ranks::take(std::uint32_t unit) {
  // A later pass brings more, or other groups do.
  if ((world_ && !updates_) || same_slice_ != nullptr) return {};
  auto shard = shard_of_unit(unit);
  try {
    average_sum(*shard);
  } catch (const std::exception& error) {
    return Status::error(Code::kOverBudget, error.what()).in(shard->name);
  }
  if (updates_) make_ready(shard);
  return {};
}

void Ranks::average_sum(Shard& shard) {
  c10::AutoGradMode no_grad(false);
  std::lock_guard lock(shard.mutex);
  if (!shard.tree.empty()) shard.sum = shard.tree.total(add_tensor);
  const bool add = shard.grad.defined();
  const auto count = static_cast<std::int64_t>(shard.mine.size());
  if (!add) {
    shard.grad = Unit::without_content(
        manager_.shared_from_this(), count, shard.weight.scalar_type(),
        {shard.name, std::string(role_name(Role::kGrad))}, Role::kGrad);
    gather_->set_slice(shard.grad_unit, Unit::of(shard.grad)->state());
  }
  Pins pins;
  pins.take(shard.grad, add ? Use::kChange : Use::kReplace);
  with_type(shard.grad.scalar_type(), [&](auto zero) {
    average(shard.sum.const_data_ptr<float>(),
            1.0F / static_cast<float>(size()),
            static_cast<decltype(zero)*>(shard.grad.mutable_data_ptr()), count,
            add);
  });
  shard.sum = at::Tensor();
}

void Ranks::make_ready(const std::shared_ptr<Shard>& shard) {
  std::lock_guard lock(mutex_);
  shard->is_due = true;
  ready_.push_back(shard);
  changed_.notify_all();
}

void Ranks::update_inside(Update update,
                          const std::function<std::string()>& how) {
  if (updates_) return;
  how_ = how ? how() : "";
  update_ = std::move(update);
  updates_ = true;
}

void Ranks::update_ready() {
  std::vector<std::shared_ptr<Shard>> shards;
  {
    std::lock_guard lock(mutex_);
    shards.assign(ready_.begin(), ready_.end());
    ready_.clear();
  }
  if (shards.empty()) return;
  std::vector<at::Tensor> parameters;
  for (const auto& shard : shards) {
    if (at::Tensor parameter = shard->parameter(); parameter.defined()) {
      parameters.push_back(parameter);
    }
  }
  update_(parameters);
  updated_.insert(updated_.end(), parameters.begin(), parameters.end());
  std::lock_guard lock(mutex_);
  for (const auto& shard : shards) shard->is_due = false;
  changed_.notify_all();
}

void Ranks::close(const std::string& what) {
  while (!leaving_.empty()) send_next();
  wait_for_sent(0);
  throw_if_failed(gather_->exchange().close_pass(number_, what)->wait());
}

void Ranks::leave_pass() {
  updater_ = std::this_thread::get_id();
  // A hook of somebody else's may be where ours was.
  for (const auto& shard : std::set(seen_)) {
    if (at::Tensor parameter = shard->parameter(); parameter.defined()) {
      reduce(parameter, 0);
    }
  }
  // torch.autograd.grad() asks without accumulating.
  if (!reduced_.empty()) return end_pass();
  put_back();
  end_thread();
}

// Gradients that this pass has not reached.
void Ranks::put_back() {
  for (auto& [shard, grad] : aside_) {
    at::Tensor parameter = shard->parameter();
    if (parameter.defined() && !parameter.grad().defined()) {
      parameter.mutable_grad() = grad;
    }
  }
  aside_.clear();
}

void Ranks::end_pass() {
  c10::AutoGradMode no_grad(false);
  for (const auto& shard : shards()) {
    if (aside_.contains(shard)) continue;
    at::Tensor parameter = shard->parameter();
    bool there = parameter.defined() && parameter.grad().defined();
    if (!there) release_kept(*shard);
  }
  // Of some, only the end tells that they are updated.
  const bool all_due = (world_ || same_slice_ != nullptr) && update_;
  if (all_due) mark_all_due(true);
  close(update_ ? std::string(kBackward) + " with " + how_ : kBackward);
  auto units = gather_->exchange().wait_closed(number_);
  throw_if_failed(units.status());
  for (std::uint32_t unit : *units) {
    throw_if_failed(gather_->exchange().settled(unit, number_ + 1));
  }
  if (same_slice_ != nullptr) sum_groups(*units);
  std::vector<std::shared_ptr<Shard>> shards;
  for (std::uint32_t unit : *units) {
    if (auto shard = shard_of_unit(unit)) shards.push_back(shard);
  }
  if (world_) {
    waiting_.insert(shards.begin(), shards.end());
    shards.clear();
    if (update_) {
      shards.assign(waiting_.begin(), waiting_.end());
      waiting_.clear();
    }
  }
  if (update_) {
    for (const auto& shard : shards) update_complete(shard);
  }
  count_pass();
  ++since_step_;
  if (all_due) mark_all_due(false);
  for (const auto& shard : shards) set_gradient(shard);
  put_back();
  for (const at::Tensor& parameter : std::exchange(updated_, {})) {
    if (Unit* unit = Unit::of(parameter)) unit->outdate();
  }
  const bool ended = std::exchange(update_, {}) != nullptr;
  updates_ = false;
  if (ended) step_begin_ = number_.load();
  reduced_.clear();
  end_thread();
  if (ended) gather_->end_step();
}

void Ranks::forget_sums() {
  for (const auto& shard : waiting_) {
    std::lock_guard lock(shard->mutex);
    shard->tree = {};
  }
  waiting_.clear();
  step_begin_ = number_.load();
}

void Ranks::update_complete(const std::shared_ptr<Shard>& shard) {
  if (shard->mine.size() == 0) {  // of which nobody tells
    std::lock_guard lock(mutex_);
    ready_.push_back(shard);
  }
  bool left = false;  // this pass had none, an earlier one did
  {
    std::lock_guard lock(shard->mutex);
    left = !shard->tree.empty();
  }
  if (left) {
    average_sum(*shard);
    make_ready(shard);
  }
  update_ready();
}

void Ranks::abandon_pass() {
  seen_.clear();
  reduced_.clear();
  end_thread();
  leaving_.clear();
  sent_.clear();
  sent_bytes_ = 0;
  aside_.clear();
  update_ = {};
  updates_ = false;
  updated_.clear();
  fail(Status::error(Code::kInvalid,
                     "an exception ended a backward pass half way"));
}

// Where `p.grad` was used inside backward, or is somebody's own, it stays so.
void Ranks::set_gradient(const std::shared_ptr<Shard>& shard) {
  at::Tensor parameter = shard->parameter();
  if (!parameter.defined()) return;
  at::Tensor& grad = parameter.mutable_grad();
  if (grad.defined()) return;
  auto aside = aside_.find(shard);
  if (aside != aside_.end()) {
    grad = aside->second;
    Unit::of(grad)->outdate();
    return;
  }
  if (Unit::of(parameter) == nullptr) return;
  grad = Unit::gradient(manager_.shared_from_this(), parameter.detach(), shard);
  shard->whole_grad =
      c10::weak_intrusive_ptr<c10::TensorImpl>(grad.getIntrusivePtr());
}

void Ranks::drop_gradient(Shard& shard) {
  announce_change(shard.grad_unit);
  auto forget = [this, unit = shard.grad_unit] {
    at::Tensor last;
    if (auto known = shard_of_unit(unit)) {
      std::lock_guard lock(known->mutex);
      last = std::exchange(known->grad, at::Tensor());
    }
    return Status();
  };
  gather_->exchange().change_later(shard.grad_unit, forget);
}

void Ranks::make_up_passes(std::uint64_t count, const Update& update,
                           const std::string& how) {
  while (since_step_ < count) {
    make_up_pass(since_step_ + 1 == count ? update : Update(), how);
  }
}

void Ranks::make_up_pass(Update update, const std::string& how) {
  updater_ = std::this_thread::get_id();
  if (update) update_inside(std::move(update), [&] { return how; });
  try {
    end_pass();
  } catch (...) {
    abandon_pass();
    throw;
  }
}

void Ranks::wait_for_all(const std::string& what, double seconds) {
  constexpr double kWarnSeconds = 10;
  const auto missing = [&](double patience) {
    auto ranks = gather_->exchange().missing(
        number_, std::chrono::milliseconds(std::llround(1000 * patience)));
    throw_if_error(ranks.status().in(what));
    return std::move(ranks).value();
  };
  std::vector<int> ranks = missing(std::min(seconds, kWarnSeconds));
  if (ranks.empty()) return;
  const auto text = [&] {
    return strf(
        "rank %d waits in %s for rank %d, which has not called it: "
        "call it on all ranks",
        rank(), what.c_str(), ranks.front());
  };
  log(LogLevel::kWarning, "%s", text().c_str());
  ranks = missing(std::max(0.0, seconds - kWarnSeconds));
  if (ranks.empty()) return;
  Status why = Status::error(Code::kInvalid, text());
  fail(why);
  throw_if_error(why);
}

void Ranks::meet(const std::string& what, double seconds) {
  look_for_edits();
  close(what);
  wait_for_all(what, seconds);
  throw_if_failed(gather_->exchange().wait_closed(number_).status());
  count_pass();
  ++step_begin_;  // it is no micro-batch
}

void Ranks::count_pass() {
  ++number_;
  gather_->set_passes(number_);
}

void Ranks::begin_step(const std::vector<at::Tensor>& due,
                       const std::string& how) {
  if (since_step_ == 0) make_up_pass({}, how);
  look_for_edits();
  updater_ = std::this_thread::get_id();
  {
    std::lock_guard lock(mutex_);
    for (const at::Tensor& parameter : due) {
      if (Shard* shard = find_shard(parameter)) shard->is_due = true;
    }
  }
  close(std::string(kStep) + " with " + how);
  throw_if_failed(gather_->exchange().wait_closed(number_).status());
  for (const at::Tensor& parameter : due) {
    if (Shard* shard = find_shard(parameter)) {
      throw_if_failed(gather_->exchange().settled(shard->grad_unit, number_));
    }
  }
}

void Ranks::end_step(const std::vector<at::Tensor>& updated) {
  {
    std::lock_guard lock(mutex_);
    for (const at::Tensor& parameter : updated) {
      if (Shard* shard = find_shard(parameter)) shard->is_due = false;
    }
    changed_.notify_all();
  }
  end_thread();
  count_pass();
  since_step_ = 0;
  for (const at::Tensor& parameter : updated) {
    if (find_shard(parameter) != nullptr) Unit::of(parameter)->outdate();
  }
  gather_->end_step();
}

}  // namespace zinf
