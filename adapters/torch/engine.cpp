#include "adapters/torch/engine.h"

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "adapters/torch/adam.h"
#include "adapters/torch/error.h"
#include "adapters/torch/hooks.h"
#include "adapters/torch/intercept.h"
#include "adapters/torch/keys.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/options.h"
#include "adapters/torch/ranks.h"
#include "zinf/adam.h"
#include "zinf/engine.h"
#include "zinf/machine.h"

namespace zinf {

std::shared_ptr<Manager> make_manager(const EngineOptions& options) {
  ManagerOptions checked = manager_options(options);
  Result<std::shared_ptr<Manager>> manager =
      Manager::create(checked, options.comm);
  throw_if_error(manager.status());
  static const std::int64_t wired = wire_operators();
  (void)wired;
  watch_data_assignments();
  return *manager;
}

void close_manager(Manager& manager, Ending ending) {
  throw_if_error(manager.close(ending));
}

void start_measuring(Manager& manager) {
  constexpr std::uint64_t kLeave = 10;  // a part for what is not in the budget
  HostMemory& memory = manager.tier().memory();
  Machine machine = inspect_machine();
  std::uint64_t most = memory.budget().usage().total.used_bytes +
                       machine.available_bytes -
                       machine.available_bytes / kLeave;
  if (machine.cgroup_limit_bytes) {
    most = std::min(most, *machine.cgroup_limit_bytes -
                              *machine.cgroup_limit_bytes / kLeave);
  }
  manager.tier().start_measuring(most);
}

static void add_ranks(EngineStats& stats, const RanksStats& ranks) {
  auto sent = [&](Lane lane) {
    return ranks.traffic.sent[static_cast<std::size_t>(lane)].bytes;
  };
  auto received = [&](Lane lane) {
    return ranks.traffic.received[static_cast<std::size_t>(lane)].bytes;
  };
  stats.rank = ranks.rank;
  stats.ranks = ranks.ranks;
  stats.weights_bytes_sent = sent(Lane::kWeights);
  stats.weights_bytes_received = received(Lane::kWeights);
  stats.grads_bytes_sent = sent(Lane::kGrads);
  stats.grads_bytes_received = received(Lane::kGrads);
  stats.between_groups_bytes_sent = ranks.between_groups.bytes_sent();
  stats.between_groups_bytes_received = ranks.between_groups.bytes_received();
  stats.gathered_bytes = ranks.wholes_bytes;
  stats.peak_gathered_bytes = ranks.wholes_high_bytes;
  stats.gather_wait_seconds = ranks.wait_seconds;
}

EngineStats engine_stats(Manager& manager) {
  ManagerStats stats = manager.stats();
  const ResidencyStats& residency = stats.tier.residency;
  const WearStats& wear = stats.tier.wear;
  const StepStats& step = stats.tier.step;
  double step_waits = step.read_wait_seconds + step.write_wait_seconds;
  std::uint64_t awaited = step.fetches + step.late;
  BudgetUsage host = process_memory()->budget().usage();
  AdamUsage updates = adam_usage();
  EngineStats made{
      .managed = stats.units,
      .weights_bytes = stats.weights_bytes,
      .resident_bytes = residency.memory_bytes,
      .peak_resident_bytes = residency.memory_high_bytes,
      .device_resident_bytes = stats.device.memory_bytes,
      .device_peak_resident_bytes = stats.device.memory_high_bytes,
      .device_bytes_in = stats.device.bytes_read,
      .device_bytes_out = stats.device.bytes_written,
      .reads = residency.reads,
      .writes = residency.writes,
      .bytes_read = residency.bytes_read,
      .bytes_written = residency.bytes_written,
      .fetches = residency.fetches,
      .late = residency.late,
      .drops = residency.drops,
      .nvme_bytes = stats.tier.nvme_bytes,
      .nvme_read_bytes_per_second = stats.tier.nvme.read_bytes_per_second,
      .nvme_write_bytes_per_second = stats.tier.nvme.write_bytes_per_second,
      .nvme_tuned_read_bytes_per_second =
          stats.tier.tuned.read_bytes_per_second,
      .nvme_tuned_write_bytes_per_second =
          stats.tier.tuned.write_bytes_per_second,
      .nvme_cpu_seconds = stats.tier.io_cpu_seconds,
      .nvme_requests = stats.tier.io_requests,
      .nvme_checksum_bytes = stats.tier.checksum_bytes,
      .nvme_checksum_cpu_seconds = stats.tier.checksum_seconds,
      .updated_parameters = updates.elements,
      .update_cpu_seconds = static_cast<double>(updates.cpu_ns) * 1e-9,
      .step_seconds = step.seconds,
      .step_compute_seconds = std::max(0.0, step.seconds - step_waits),
      .step_read_wait_seconds = step.read_wait_seconds,
      .step_write_wait_seconds = step.write_wait_seconds,
      .step_bytes_read = step.bytes_read,
      .step_bytes_written = step.bytes_written,
      .step_prefetched =
          step.reads == 0
              ? 1.0
              : 1.0 - static_cast<double>(std::min(awaited, step.reads)) /
                          static_cast<double>(step.reads),
      .step_waits = {},
      .deviations = stats.tier.mover.deviations,
      .plan_seconds = stats.tier.mover.plan_seconds,
      .planned_step_seconds = stats.tier.mover.forecast_seconds,
      .planned_step_bytes = stats.tier.mover.forecast_bytes,
      .steps = wear.steps,
      .nvme_write_bytes_per_step = wear.bytes_per_step,
      .nvme_write_tb_per_day = wear.tb_per_day,
      .nvme_endurance_bytes = wear.endurance_bytes,
      .nvme_life_per_day = wear.life_per_day,
      .nvme_life_per_year = wear.life_per_year,
      .host_limit_bytes = host.limit_bytes,
      .host_used_bytes = host.total.used_bytes,
      .host_peak_bytes = stats.tier.host.total.high_bytes,
      .host_peak_activation_bytes = stats.tier.host.of(Tag::kTensor).high_bytes,
      .host_peak_unit_bytes = stats.tier.host.of(Tag::kUnit).high_bytes,
      .updates_waiting = stats.updates_waiting,
      .intercepted = num_intercepted(),
      .escapes = stats.escapes,
      .faults = Sentinel::num_faults(),
      .audit_violations = stats.violations,
      .undeclared_writes = stats.undeclared_writes};
  if (Ranks* ranks = manager.ranks()) add_ranks(made, ranks->stats());
  for (const StateWait& wait : step.waits) {
    made.step_waits.emplace_back(wait.name, static_cast<double>(wait.ns) / 1e9);
  }
  return made;
}

std::shared_ptr<Manager> manager_of(const at::Tensor& tensor) {
  Unit* unit = Unit::of(tensor);
  return unit == nullptr ? nullptr : unit->manager();
}

std::vector<std::shared_ptr<Manager>> managers_of(
    const std::vector<at::Tensor>& tensors) {
  std::set<std::shared_ptr<Manager>> managers;
  for (const at::Tensor& tensor : tensors) managers.insert(manager_of(tensor));
  return {managers.begin(), managers.end()};
}

void adopt_parameter(const std::shared_ptr<Manager>& manager,
                     const at::Tensor& tensor, const std::string& name,
                     std::size_t tensors, bool later) {
  bool adopted = manager->adopt(tensor, Role::kWeight, {name}, tensors);
  if (adopted) manager->split(tensor, name);
  if (Unit* unit = Unit::of(tensor)) {
    unit->set_parameter();
    unit->set_parameter_name(name);
    if (unit->shard() != nullptr) unit->shard()->set_parameter(tensor);
  }
  if (!adopted && later) manager->offer(tensor, Role::kWeight, {name});
  watch_gradients(manager, tensor);
}

bool adopt_parameters(
    const std::shared_ptr<Manager>& manager,
    const std::vector<std::pair<std::string, at::Tensor>>& named) {
  std::unordered_map<const void*, std::size_t> users;
  auto storage_of = [](const at::Tensor& tensor) -> const void* {
    return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                : nullptr;
  };
  for (const auto& [name, tensor] : named) ++users[storage_of(tensor)];
  bool all = true;
  for (const auto& [name, tensor] : named) {
    adopt_parameter(manager, tensor, name, users[storage_of(tensor)], false);
    all = all && Unit::of(tensor) != nullptr;
  }
  return all;
}

UnitName grad_name(const at::Tensor& parameter) {
  Unit* unit = Unit::of(parameter);
  return {unit != nullptr ? unit->full_name().parameter : "a parameter",
          std::string(role_name(Role::kGrad))};
}

void adopt_state(const at::Tensor& parameter, const at::Tensor& state,
                 const std::string& name) {
  Unit* unit = Unit::of(parameter);
  if (unit == nullptr || unit->manager()->closed()) return;
  unit->manager()->adopt(state, Role::kState,
                         {unit->full_name().parameter, name});
}

bool states_fit_beside(const at::Tensor& parameter) {
  Unit* unit = Unit::of(parameter);
  if (unit == nullptr || parameter.is_cpu() || unit->shard() != nullptr ||
      !parameter.is_non_overlapping_and_dense()) {
    return false;
  }
  std::uint64_t each = parameter.element_size() < 4 ? 12 : 8;
  return unit->manager()->holds_states(
      parameter.device(), each * static_cast<std::uint64_t>(parameter.numel()));
}

at::Tensor zeros_for(const at::Tensor& parameter, const std::string& name,
                     c10::Device device) {
  Unit* unit = Unit::of(parameter);
  const at::Tensor kept = shard_of(parameter);
  if (unit != nullptr && !unit->manager()->closed() && device.is_cpu() &&
      kept.numel() > 0 && kept.is_non_overlapping_and_dense()) {
    return Unit::zeros(unit->manager(), kept.detach(),
                       {unit->full_name().parameter, name});
  }
  at::Tensor zeros = at::zeros_like(
      kept.detach(), at::TensorOptions().dtype(at::kFloat).device(device),
      at::MemoryFormat::Preserve);
  adopt_state(parameter, zeros, name);
  return zeros;
}

void offer_gradient(const at::Tensor& parameter) {
  std::shared_ptr<Manager> manager = manager_of(parameter);
  if (manager->closed() || !parameter.grad().defined()) return;
  manager->offer(parameter.grad(), Role::kGrad, grad_name(parameter));
}

void consume_gradient(const at::Tensor& parameter) {
  Unit* unit = Unit::of(parameter);
  const at::Tensor like =
      unit->shard() != nullptr ? parameter.detach() : parameter.grad();
  parameter.mutable_grad() =
      Unit::consumed(unit->manager(), like, grad_name(parameter));
  if (unit->shard() == nullptr) return;
  at::Tensor last;
  std::lock_guard lock(unit->shard()->mutex);
  last = std::exchange(unit->shard()->grad, at::Tensor());
}

bool is_split_over_ranks(const at::Tensor& tensor) {
  Unit* unit = Unit::of(tensor);
  return unit != nullptr && unit->shard() != nullptr;
}

at::Tensor shard_of(const at::Tensor& parameter) {
  if (!is_split_over_ranks(parameter)) return parameter;
  return Unit::of(parameter)->shard()->weight;
}

at::Tensor shard_grad_of(const at::Tensor& parameter) {
  Unit* unit = Unit::of(parameter);
  const at::Tensor& grad = parameter.grad();
  if (unit == nullptr || unit->shard() == nullptr) return grad;
  Shard& shard = *unit->shard();
  Unit* whole = Unit::of(grad);
  if (!grad.defined() || (whole != nullptr && whole->shard().get() == &shard)) {
    return shard.grad_slice();
  }
  // Somebody's own: the same on all ranks.
  auto begin = static_cast<std::int64_t>(shard.mine.begin);
  auto end = static_cast<std::int64_t>(shard.mine.end);
  at::Tensor dense = matching(grad.detach(), parameter.detach());
  return dense.as_strided({dense.numel()}, {1})
      .slice(0, begin, end)
      .to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
}

bool is_consumed(const at::Tensor& grad) {
  Unit* unit = Unit::of(grad);
  return unit != nullptr && unit->is_consumed();
}

// One that is no unit any more.
static void forget_tensor(const at::Tensor& tensor) {
  unwatch_gradients(tensor);
  remove_keys(*tensor.unsafeGetTensorImpl());
}

void release_tensor(const at::Tensor& tensor) {
  if (Unit* unit = Unit::of(tensor)) {
    throw_if_error(unit->release(tensor.storage().unsafeGetStorageImpl()));
  }
  forget_tensor(tensor);
}

void release_from_budget(const at::Tensor& tensor) {
  if (Unit* unit = Unit::of(tensor)) {
    throw_if_error(check_machine_has(unit->absent_bytes()));
    throw_if_error(
        unit->release_from_budget(tensor.storage().unsafeGetStorageImpl()));
  }
  forget_tensor(tensor);
}

}  // namespace zinf
