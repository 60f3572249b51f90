// The engine's parts in Python: zinf/engine.py and zinf/optim.py join them.
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "adapters/torch/audit.h"
#include "adapters/torch/checkpoint.h"
#include "adapters/torch/error.h"
#include "adapters/torch/hooks.h"
#include "adapters/torch/init_mode.h"
#include "adapters/torch/intercept.h"
#include "adapters/torch/keys.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/pins.h"
#include "adapters/torch/split_master.h"
#include "python/src/bindings.h"
#include "zinf/bytes.h"

namespace py = pybind11;

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

// `later`: what cannot be adopted now is tried again by itself.
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

// All parameters of a model: those that share a storage are known users of it.
// False when some could not be taken.
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

py::dict stats_of(Manager& manager) {
  ManagerStats stats;
  {
    py::gil_scoped_release release;
    stats = manager.stats();
  }
  const ResidencyStats& residency = stats.tier.residency;
  py::dict dict;
  dict["managed"] = stats.units;
  dict["weights_bytes"] = stats.weights_bytes;
  dict["resident_bytes"] = residency.memory_bytes;
  dict["peak_resident_bytes"] = residency.memory_high_bytes;
  dict["device_resident_bytes"] = stats.device.memory_bytes;
  dict["device_peak_resident_bytes"] = stats.device.memory_high_bytes;
  dict["reads"] = residency.reads;
  dict["writes"] = residency.writes;
  dict["bytes_read"] = residency.bytes_read;
  dict["bytes_written"] = residency.bytes_written;
  dict["fetches"] = residency.fetches;
  dict["drops"] = residency.drops;
  dict["nvme_bytes"] = stats.tier.nvme_bytes;
  BudgetUsage host = process_memory()->budget().usage();
  dict["host_limit_bytes"] = host.limit_bytes;
  dict["host_used_bytes"] = host.total.used_bytes;
  dict["host_peak_bytes"] = host.total.high_bytes;
  dict["intercepted"] = num_intercepted();
  dict["escapes"] = stats.escapes;
  dict["faults"] = Sentinel::num_faults();
  dict["audit_violations"] = stats.violations;
  dict["undeclared_writes"] = stats.undeclared_writes;
  return dict;
}

void release_tensor(const at::Tensor& tensor) {
  if (Unit* unit = Unit::of(tensor)) {
    throw_if_error(unit->release(tensor.storage().unsafeGetStorageImpl()));
  }
  unwatch_gradients(tensor);
  remove_keys(*tensor.unsafeGetTensorImpl());
}

}  // namespace

void bind_engine(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Manager, std::shared_ptr<Manager>>(module, "Manager")
      .def(py::init(&make_manager), py::kw_only(), py::arg("host_bytes"),
           py::arg("device_bytes"), py::arg("nvme"), py::arg("weights"),
           py::arg("states"), py::arg("evict_always"), py::arg("audit"),
           py::arg("away_bytes"))
      .def("begin_init",
           [](std::shared_ptr<Manager> self) {
             InitMode::begin(std::move(self));
           })
      .def(
          "end_init", [](Manager&) { InitMode::end(); }, Released())
      .def(
          "adopt",
          [](Manager& self, const at::Tensor& tensor, const std::string& role,
             const std::string& name, std::size_t tensors) {
            Role which = role == "state"  ? Role::kState
                         : role == "grad" ? Role::kGrad
                                          : Role::kWeight;
            return self.adopt(tensor, which, name, tensors);
          },
          py::arg("tensor"), py::arg("role"), py::arg("name"),
          py::arg("tensors") = 1, Released())
      .def(
          "adopt_parameters",
          [](const std::shared_ptr<Manager>& self,
             const std::vector<std::pair<std::string, at::Tensor>>& named) {
            return adopt_parameters(self, named);
          },
          Released())
      .def(
          "adopt_parameter",
          [](const std::shared_ptr<Manager>& self, const at::Tensor& tensor,
             const std::string& name) {
            adopt_parameter(self, tensor, name, 1, true);
          },
          Released())
      .def("adopt_offered", &Manager::adopt_offered, Released())
      .def(
          "close",
          [](Manager& self) {
            if (self.options().audit && !self.closed()) stop_audit();
            self.close();
          },
          Released())
      .def("fail", &Manager::fail)
      .def("heal", &Manager::heal)
      .def("unlink_files", &Manager::unlink_files, Released())
      .def("stats", &stats_of);

  module.def("manager_of",
             [](const at::Tensor& tensor) -> std::shared_ptr<Manager> {
               Unit* unit = Unit::of(tensor);
               return unit == nullptr ? nullptr : unit->manager();
             });
  module.def("managers_of", [](const std::vector<at::Tensor>& tensors) {
    std::set<std::shared_ptr<Manager>> managers;  // null for what has none
    for (const at::Tensor& tensor : tensors) {
      Unit* unit = Unit::of(tensor);
      managers.insert(unit == nullptr ? nullptr : unit->manager());
    }
    return std::vector<std::shared_ptr<Manager>>(managers.begin(),
                                                 managers.end());
  });
  module.def("consume_gradient", [](at::Tensor& parameter) {
    Unit* unit = Unit::of(parameter);
    parameter.mutable_grad() = Unit::consumed(unit->manager(), parameter.grad(),
                                              "gradient of " + unit->name());
  });
  module.def("is_consumed", [](const at::Tensor& grad) {
    Unit* unit = Unit::of(grad);
    return unit != nullptr && unit->is_consumed();
  });
  module.def("is_managed", [](const at::Tensor& tensor) {
    return Unit::of(tensor) != nullptr;
  });

  module.def("has_keys", [](const at::Tensor& tensor) {
    return tensor.key_set().has(kOuterKey);
  });
  module.def("without_keys", [](const at::Tensor& tensor) {
    // Made under the keys of nothing: init() must not adopt it.
    c10::impl::ExcludeDispatchKeyGuard guard(kOuterKey);
    return at::empty({0}, tensor.options());
  });
  module.def("release", &release_tensor, Released());
  using Named = std::tuple<std::string, std::string, at::Tensor,
                           std::shared_ptr<SplitMaster>>;
  module.def(
      "save_tensors",
      [](const std::string& path, const std::vector<Named>& tensors,
         std::uint64_t step, const std::string& extra) {
        std::vector<NamedTensor> named;
        for (const auto& [unit, state, tensor, split] : tensors) {
          named.push_back({unit, state, tensor, split});
        }
        py::gil_scoped_release released;
        throw_if_error(save_tensors(path, named, step, extra));
      },
      py::arg("path"), py::arg("tensors"), py::arg("step"), py::arg("extra"));
  py::class_<TensorReader>(module, "TensorReader")
      .def(py::init([](const std::string& path) {
        auto reader = TensorReader::open(path);
        throw_if_error(reader.status());
        return std::move(reader).value();
      }))
      .def_property_readonly("step", &TensorReader::step)
      .def("extra",
           [](TensorReader& self) {
             Result<std::string> extra = self.extra();
             throw_if_error(extra.status());
             return py::bytes(*extra);
           })
      .def("check",
           [](const TensorReader& self, const std::string& unit,
              const std::string& state, const at::Tensor& tensor) {
             throw_if_error(self.check({unit, state, tensor, nullptr}));
           })
      .def("read", [](TensorReader& self, const std::string& unit,
                      const std::string& state, const at::Tensor& tensor) {
        py::gil_scoped_release released;
        throw_if_error(self.read({unit, state, tensor, nullptr}));
      });
  module.def(
      "trim_host_memory",
      [] {
        process_memory()->trim();
        return process_memory()->budget().usage().total.used_bytes;
      },
      "Gives unused memory back to the system; the bytes still in use.",
      Released());
  module.def("parse_bytes", [](const std::string& text) {
    Result<std::uint64_t> bytes = parse_bytes(text);
    throw_if_error(bytes.status());
    return *bytes;
  });
}

}  // namespace zinf
