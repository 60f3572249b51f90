#include "adapters/torch/engine.h"

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "adapters/torch/audit.h"
#include "adapters/torch/error.h"
#include "adapters/torch/hooks.h"
#include "adapters/torch/intercept.h"
#include "adapters/torch/keys.h"
#include "adapters/torch/manager.h"
#include "zinf/machine.h"

namespace zinf {
namespace {

Where parse_where(const std::string& argument, const std::string& value) {
  if (value == "auto") return Where::kAuto;
  if (value == "host") return Where::kHost;
  if (value == "nvme") return Where::kNvme;
  throw Error(Status::error(Code::kInvalid,
                            argument + " is \"" + value +
                                "\", must be \"auto\", \"host\" or \"nvme\""));
}

}  // namespace

std::shared_ptr<Manager> make_manager(std::uint64_t host_bytes,
                                      std::uint64_t device_bytes,
                                      std::vector<std::string> nvme,
                                      const std::string& weights,
                                      const std::string& states,
                                      bool evict_always, bool audit,
                                      std::uint64_t away_bytes) {
  ManagerOptions options;
  options.tier = {.nvme = std::move(nvme),
                  .weights = parse_where("weights", weights),
                  .states = parse_where("states", states),
                  .away_bytes = evict_always ? 0 : away_bytes};
  options.host_bytes = host_bytes;
  options.device_bytes = device_bytes;
  options.evict_always = evict_always;
  options.audit = audit;
  Result<std::shared_ptr<Manager>> manager = Manager::create(options);
  throw_if_error(manager.status());
  static const std::int64_t wired = wire_operators();
  (void)wired;
  watch_data_assignments();
  if (audit) start_audit();
  return *manager;
}

void close_manager(Manager& manager) {
  if (manager.options().audit && !manager.closed()) stop_audit();
  manager.close();
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
  memory.start_measuring(most);
}

EngineStats engine_stats(Manager& manager) {
  ManagerStats stats = manager.stats();
  const ResidencyStats& residency = stats.tier.residency;
  BudgetUsage host = process_memory()->budget().usage();
  return {.managed = stats.units,
          .weights_bytes = stats.weights_bytes,
          .resident_bytes = residency.memory_bytes,
          .peak_resident_bytes = residency.memory_high_bytes,
          .device_resident_bytes = stats.device.memory_bytes,
          .device_peak_resident_bytes = stats.device.memory_high_bytes,
          .reads = residency.reads,
          .writes = residency.writes,
          .bytes_read = residency.bytes_read,
          .bytes_written = residency.bytes_written,
          .fetches = residency.fetches,
          .drops = residency.drops,
          .nvme_bytes = stats.tier.nvme_bytes,
          .host_limit_bytes = host.limit_bytes,
          .host_used_bytes = host.total.used_bytes,
          .host_peak_bytes = host.total.high_bytes,
          .intercepted = num_intercepted(),
          .escapes = stats.escapes,
          .faults = Sentinel::num_faults(),
          .audit_violations = stats.violations,
          .undeclared_writes = stats.undeclared_writes};
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
  bool adopted = manager->adopt(tensor, Role::kWeight, name, tensors);
  if (Unit* unit = Unit::of(tensor)) {
    unit->set_parameter();
    if (unit->name() != name) unit->set_name(name);
  }
  if (!adopted && later) manager->offer(tensor, Role::kWeight, name);
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

at::Tensor zeros_for(const at::Tensor& parameter, const std::string& name) {
  std::shared_ptr<Manager> manager = manager_of(parameter);
  if (manager != nullptr && parameter.is_cpu() && parameter.numel() > 0 &&
      parameter.is_non_overlapping_and_dense()) {
    return Unit::zeros(manager, parameter.detach(), name);
  }
  at::Tensor zeros = at::zeros_like(
      parameter, parameter.options().dtype(at::kFloat).device(at::kCPU),
      at::MemoryFormat::Preserve);
  if (manager != nullptr) (void)manager->adopt(zeros, Role::kState, name);
  return zeros;
}

void offer_gradient(const at::Tensor& parameter) {
  manager_of(parameter)->offer(parameter.grad(), Role::kGrad, "gradient");
}

void consume_gradient(const at::Tensor& parameter) {
  Unit* unit = Unit::of(parameter);
  parameter.mutable_grad() = Unit::consumed(unit->manager(), parameter.grad(),
                                            "gradient of " + unit->name());
}

void release_tensor(const at::Tensor& tensor) {
  if (Unit* unit = Unit::of(tensor)) {
    throw_if_error(unit->release(tensor.storage().unsafeGetStorageImpl()));
  }
  unwatch_gradients(tensor);
  remove_keys(*tensor.unsafeGetTensorImpl());
}

}  // namespace zinf
