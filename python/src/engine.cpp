// The engine's parts in Python: zinf/engine.py and zinf/optim.py join them.
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "adapters/torch/c10d_comm.h"
#include "adapters/torch/checkpoint.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/init_mode.h"
#include "adapters/torch/keys.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/probe.h"
#include "adapters/torch/ranks.h"
#include "adapters/torch/split_master.h"
#include "adapters/torch/training_budget.h"
#include "python/src/bindings.h"
#include "src/base/strf.h"
#include "zinf/engine.h"

namespace py = pybind11;

namespace zinf {
namespace {

// What an operator cannot do is a RuntimeError in Python, whatever the code.
template <class Call>
auto like_operator(Call call) {
  try {
    return call();
  } catch (const Error& error) {
    throw std::runtime_error(error.what());
  }
}

std::optional<std::uintptr_t> own_address(Unit* unit) {
  if (unit == nullptr) return {};
  void* address = like_operator([&] { return unit->own_address(); });
  if (address == nullptr) return {};
  return reinterpret_cast<std::uintptr_t>(address);
}

py::dict stats_of(Manager& manager) {
  EngineStats stats;
  {
    py::gil_scoped_release release;
    stats = engine_stats(manager);
  }
  py::dict dict;
  dict["managed"] = stats.managed;
  dict["weights_bytes"] = stats.weights_bytes;
  dict["resident_bytes"] = stats.resident_bytes;
  dict["peak_resident_bytes"] = stats.peak_resident_bytes;
  dict["device_resident_bytes"] = stats.device_resident_bytes;
  dict["device_peak_resident_bytes"] = stats.device_peak_resident_bytes;
  dict["device_bytes_in"] = stats.device_bytes_in;
  dict["device_bytes_out"] = stats.device_bytes_out;
  dict["reads"] = stats.reads;
  dict["writes"] = stats.writes;
  dict["bytes_read"] = stats.bytes_read;
  dict["bytes_written"] = stats.bytes_written;
  dict["fetches"] = stats.fetches;
  dict["late"] = stats.late;
  dict["drops"] = stats.drops;
  dict["nvme_bytes"] = stats.nvme_bytes;
  dict["nvme_read_bytes_per_second"] = stats.nvme_read_bytes_per_second;
  dict["nvme_write_bytes_per_second"] = stats.nvme_write_bytes_per_second;
  dict["nvme_tuned_read_bytes_per_second"] =
      stats.nvme_tuned_read_bytes_per_second;
  dict["nvme_tuned_write_bytes_per_second"] =
      stats.nvme_tuned_write_bytes_per_second;
  dict["nvme_cpu_seconds"] = stats.nvme_cpu_seconds;
  dict["nvme_requests"] = stats.nvme_requests;
  dict["nvme_checksum_bytes"] = stats.nvme_checksum_bytes;
  dict["nvme_checksum_cpu_seconds"] = stats.nvme_checksum_cpu_seconds;
  dict["updated_parameters"] = stats.updated_parameters;
  dict["update_cpu_seconds"] = stats.update_cpu_seconds;
  dict["step_seconds"] = stats.step_seconds;
  dict["step_compute_seconds"] = stats.step_compute_seconds;
  dict["step_read_wait_seconds"] = stats.step_read_wait_seconds;
  dict["step_write_wait_seconds"] = stats.step_write_wait_seconds;
  dict["step_bytes_read"] = stats.step_bytes_read;
  dict["step_bytes_written"] = stats.step_bytes_written;
  dict["step_prefetched"] = stats.step_prefetched;
  dict["deviations"] = stats.deviations;
  dict["plan_seconds"] = stats.plan_seconds;
  dict["planned_step_seconds"] = stats.planned_step_seconds;
  dict["planned_step_bytes"] = stats.planned_step_bytes;
  dict["steps"] = stats.steps;
  dict["nvme_write_bytes_per_step"] = stats.nvme_write_bytes_per_step;
  dict["nvme_write_tb_per_day"] = stats.nvme_write_tb_per_day;
  dict["nvme_endurance_bytes"] = stats.nvme_endurance_bytes;
  dict["nvme_life_per_day"] = stats.nvme_life_per_day;
  dict["nvme_life_per_year"] = stats.nvme_life_per_year;
  dict["host_limit_bytes"] = stats.host_limit_bytes;
  dict["host_used_bytes"] = stats.host_used_bytes;
  dict["host_peak_bytes"] = stats.host_peak_bytes;
  dict["host_peak_activation_bytes"] = stats.host_peak_activation_bytes;
  dict["host_peak_unit_bytes"] = stats.host_peak_unit_bytes;
  dict["updates_waiting"] = stats.updates_waiting;
  dict["intercepted"] = stats.intercepted;
  dict["escapes"] = stats.escapes;
  dict["faults"] = stats.faults;
  dict["audit_violations"] = stats.audit_violations;
  dict["undeclared_writes"] = stats.undeclared_writes;
  dict["rank"] = stats.rank;
  dict["ranks"] = stats.ranks;
  dict["weights_bytes_sent"] = stats.weights_bytes_sent;
  dict["weights_bytes_received"] = stats.weights_bytes_received;
  dict["grads_bytes_sent"] = stats.grads_bytes_sent;
  dict["grads_bytes_received"] = stats.grads_bytes_received;
  dict["between_groups_bytes_sent"] = stats.between_groups_bytes_sent;
  dict["between_groups_bytes_received"] = stats.between_groups_bytes_received;
  dict["gathered_bytes"] = stats.gathered_bytes;
  dict["peak_gathered_bytes"] = stats.peak_gathered_bytes;
  dict["gather_wait_seconds"] = stats.gather_wait_seconds;
  return dict;
}

std::shared_ptr<Comm> comm_of(const std::string& group) {
  Result<std::unique_ptr<Comm>> comm = make_c10d_comm(group);
  throw_if_error(comm.status());
  return std::move(comm).value();
}

}  // namespace

void bind_engine(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Manager, std::shared_ptr<Manager>>(module, "Manager")
      .def(py::init([](const std::optional<std::string>& host_memory,
                       const std::optional<std::string>& device_memory,
                       std::vector<std::string> nvme, std::string weights,
                       std::string states, std::string evict, bool audit,
                       const std::optional<std::string>& nvme_endurance,
                       const std::optional<std::string>& group, int stage,
                       int partition_group, std::string deterministic) {
             EngineOptions options = {
                 .nvme = std::move(nvme),
                 .weights = std::move(weights),
                 .states = std::move(states),
                 .evict = std::move(evict),
                 .audit = audit,
                 .stage = stage,
                 .partition_group = partition_group,
                 .deterministic = std::move(deterministic)};
             if (host_memory) options.host_memory = *host_memory;
             if (device_memory) options.device_memory = *device_memory;
             if (nvme_endurance) options.nvme_endurance = *nvme_endurance;
             py::gil_scoped_release released;
             if (group) options.comm = comm_of(*group);
             return make_manager(options);
           }),
           py::kw_only(), py::arg("host_memory"), py::arg("device_memory"),
           py::arg("nvme"), py::arg("weights"), py::arg("states"),
           py::arg("evict"), py::arg("audit"), py::arg("nvme_endurance"),
           py::arg("group"), py::arg("stage"), py::arg("partition_group"),
           py::arg("deterministic"))
      .def_property_readonly("ranks", &Manager::ranks,
                             py::return_value_policy::reference_internal)
      .def_property_readonly(
          "nvme",
          [](const Manager& self) {
            std::vector<std::string> paths;
            for (const NvmePath& path : self.options().tier.nvme)
              paths.push_back(path.path);
            return paths;
          })
      .def("begin_init",
           [](std::shared_ptr<Manager> self) {
             InitMode::begin(std::move(self));
           })
      .def(
          "end_init", [](Manager&) { InitMode::end(); }, Released())
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
          [](Manager& self, const std::string& ending) {
            close_manager(self, ending == "discard" ? Ending::kDiscard
                                : ending == "keep what fits"
                                    ? Ending::kKeepWhatFits
                                    : Ending::kKeepAll);
          },
          Released())
      .def_property_readonly("closed", &Manager::closed)
      .def_static("live", &Manager::live, "All that are not closed.")
      .def("fail", &Manager::fail)
      .def("heal", &Manager::heal)
      .def("abandon_updates", &Manager::abandon_updates, Released())
      .def(
          "check_training",
          [](Manager& self, const std::vector<at::Tensor>& parameters,
             const std::vector<at::Tensor>& fresh, bool split, bool waiting) {
            check_training(self, {parameters, fresh, split, waiting});
          },
          py::kw_only(), py::arg("parameters"), py::arg("fresh"),
          py::arg("split"), py::arg("waiting"), Released())
      .def(
          "check_device_memory",
          [](Manager& self) { check_device_memory(self); }, Released())
      .def("count_step", &Manager::count_step, Released())
      .def("wait_for_updates", &Manager::wait_for_updates, Released())
      .def("stats", &stats_of)
      .def("step_waits", [](Manager& self) {
        py::gil_scoped_release released;
        return engine_stats(self).step_waits;
      });

  py::class_<Need>(module, "Need", "What engine.probe() has found.")
      .def_readonly("least_bytes", &Need::least_bytes,
                    "Of host_memory, for the step.")
      .def_readonly("limit_bytes", &Need::limit_bytes, "host_memory as it is.")
      .def_property_readonly("fits", &Need::fits)
      .def("__str__", &Need::text)
      .def("__repr__", [](const Need& self) {
        return strf("Need(least_bytes=%llu, limit_bytes=%llu)",
                    static_cast<unsigned long long>(self.least_bytes),
                    static_cast<unsigned long long>(self.limit_bytes));
      });
  py::class_<Probe, std::shared_ptr<Probe>>(module, "Probe")
      .def_static("begin", &Probe::begin, Released())
      .def_static("under_way", &Probe::under_way)
      .def("hold_states", &Probe::hold_states, py::arg("fresh"), py::kw_only(),
           py::arg("split"), Released())
      .def("step", &Probe::step, py::kw_only(), py::arg("due"),
           py::arg("fresh"), py::arg("split"), Released())
      .def("update", &Probe::update, py::arg("parameter"), py::kw_only(),
           py::arg("is_fresh"), py::arg("split"), Released())
      .def("end", &Probe::end, Released())
      .def("check_weights", &Probe::check_weights);

  py::class_<UpdateBytes>(module, "UpdateBytes")
      .def_readonly("weight_stays", &UpdateBytes::weight_stays);
  module.def("update_bytes", &update_bytes, py::arg("parameter"), py::kw_only(),
             py::arg("split"));
  module.def("check_first_update", &check_first_update, py::arg("parameter"),
             py::kw_only(), py::arg("split"), Released());

  module.def("manager_of", &manager_of);
  module.def("managers_of", &managers_of);
  module.def("adopt_state", &adopt_state, Released());
  module.def("is_consumed", &is_consumed);
  module.def("zeros_for", &zeros_for, Released());
  module.def("states_fit_beside", &states_fit_beside, Released());
  module.def("is_managed", [](const at::Tensor& tensor) {
    return Unit::of(tensor) != nullptr;
  });

  module.def("dispatch_keys", [] {
    return std::vector<std::string>{c10::toString(kOuterKey),
                                    c10::toString(kInnerKey)};
  });
  module.def("install_fault_handler", &install_fault_handler);
  module.def("remove_fault_handler", &remove_fault_handler);
  module.def("address_of_tensor", [](const at::Tensor& tensor) {
    Unit* unit = Unit::of(tensor);
    std::optional<std::uintptr_t> address;
    if (unit != nullptr && tensor.numel() > 0) address = own_address(unit);
    if (address) *address += tensor.storage_offset() * tensor.itemsize();
    return address;
  });
  module.def("address_of_storage", [](const at::Storage& storage) {
    return own_address(Unit::of(storage.unsafeGetStorageImpl()));
  });
  module.def("hold_content_for", [](const at::Tensor& tensor) {
    Unit* unit = Unit::of(tensor);
    if (unit != nullptr) like_operator([&] { unit->hold_for(tensor); });
  });
  module.def("has_keys", [](const at::Tensor& tensor) {
    return tensor.key_set().has(kOuterKey);
  });
  module.def("without_keys", [](const at::Tensor& tensor) {
    // Made under the keys of nothing: init() must not adopt it.
    c10::impl::ExcludeDispatchKeyGuard guard(kOuterKey);
    return at::empty({0}, tensor.options());
  });
  module.def("release", &release_from_budget, Released());
  using Named = std::tuple<std::string, std::string, at::Tensor,
                           std::shared_ptr<SplitMaster>>;
  auto named_tensors = [](const std::vector<Named>& tensors) {
    std::vector<NamedTensor> named;
    for (const auto& [unit, state, tensor, split] : tensors) {
      named.push_back({unit, state, tensor, split});
    }
    return named;
  };
  module.def(
      "save_tensors",
      [=](const std::string& path, const std::vector<Named>& tensors,
          std::uint64_t step, const std::string& extra) {
        std::vector<NamedTensor> named = named_tensors(tensors);
        py::gil_scoped_release released;
        throw_if_error(save_tensors(path, named, step, extra));
      },
      py::arg("path"), py::arg("tensors"), py::arg("step"), py::arg("extra"));
  py::class_<WrittenTensors>(module, "WrittenTensors")
      .def(py::init([=](const std::string& parent,
                        const std::vector<Named>& tensors, std::uint64_t step,
                        const std::string& extra) {
             std::vector<NamedTensor> named = named_tensors(tensors);
             py::gil_scoped_release released;
             auto written = WrittenTensors::write(parent, named, step, extra);
             throw_if_error(written.status());
             return std::move(written).value();
           }),
           py::arg("parent"), py::arg("tensors"), py::arg("step"),
           py::arg("extra"))
      .def("link", [](WrittenTensors& self, const std::string& path) {
        py::gil_scoped_release released;
        throw_if_error(self.link(path));
      });
  using tier::NewDirectory;
  using tier::NewParents;
  py::class_<NewParents>(module, "NewParents")
      .def(py::init([](const std::string& path) {
        auto parents = NewParents::make(path);
        throw_if_error(parents.status().in("save"));
        return std::make_unique<NewParents>(std::move(parents).value());
      }))
      .def("keep", &NewParents::keep)
      .def("remove", &NewParents::remove);
  py::class_<NewDirectory>(module, "NewDirectory")
      .def(py::init([](const std::string& path) {
        auto directory = NewDirectory::make(path);
        throw_if_error(directory.status().in("save"));
        return std::make_unique<NewDirectory>(std::move(directory).value());
      }))
      .def_property_readonly("path", &NewDirectory::path)
      .def("publish",
           [](NewDirectory& self) {
             py::gil_scoped_release released;
             throw_if_error(self.publish().in("save"));
           })
      .def("remove", &NewDirectory::remove);
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
}

}  // namespace zinf
