// Faults for tests: no part of the package's interface.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "adapters/torch/device_link.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "python/src/bindings.h"
#include "zinf/fault_injector.h"

namespace py = pybind11;

namespace zinf {
namespace {

io::Operation operation_of(const std::string& name) {
  for (std::size_t i = 0; i < io::kNumOperations; ++i) {
    auto operation = static_cast<io::Operation>(i);
    if (io::operation_name(operation) == name) return operation;
  }
  throw Error(Status::error(Code::kInvalid, "no operation \"" + name + "\""));
}

io::Fault::Kind kind_of(const std::string& name) {
  using Kind = io::Fault::Kind;
  constexpr std::array<std::pair<const char*, Kind>, 6> kKinds = {
      {{"error", Kind::kError},
       {"short", Kind::kShort},
       {"torn", Kind::kTorn},
       {"lost", Kind::kLost},
       {"flip", Kind::kFlip},
       {"kill", Kind::kKill}}};
  for (const auto& [known, kind] : kKinds) {
    if (name == known) return kind;
  }
  throw Error(Status::error(Code::kInvalid, "no fault \"" + name + "\""));
}

void skip_device_waits(const std::vector<std::string>& names) {
  constexpr std::array<const char*, kNumDeviceWaits> kNames = {
      "arrival", "uses", "free", "staging"};
  std::array<bool, kNumDeviceWaits> skipped = {};
  for (const std::string& name : names) {
    auto known = std::ranges::find(kNames, name);
    if (known == kNames.end()) {
      throw Error(Status::error(
          Code::kInvalid,
          "no wait \"" + name + "\", only arrival, uses, free, staging"));
    }
    skipped[static_cast<std::size_t>(known - kNames.begin())] = true;
  }
  std::ranges::copy(skipped, skipped_waits);
}

void set_verify(Manager& manager, const std::string& when) {
  if (when != "always" && when != "never") {
    throw Error(Status::error(Code::kInvalid,
                              "verify is always or never, not " + when));
  }
  manager.tier().set_verify(when == "always" ? Verify::kAlways
                                             : Verify::kNever);
}

}  // namespace

void bind_faults(py::module_& module) {
  module.def("_skip_device_waits", &skip_device_waits,
             "For tests: waits of copies that are left out from now on.");
  module.def("_set_verify", &set_verify,
             "For measurements: whether reads of NVMe are verified.");
  using io::FaultInjector;
  py::class_<FaultInjector, std::shared_ptr<FaultInjector>>(
      module, "_FaultInjector",
      "For tests: every file that is opened from now on can be made to fail.")
      .def(py::init(&FaultInjector::install))
      .def(
          "set",
          [](FaultInjector& self, const std::string& kind,
             const std::string& on, std::uint64_t nth, int errnum,
             bool and_after) {
            self.set({.kind = kind_of(kind),
                      .on = operation_of(on),
                      .errnum = errnum,
                      .nth = nth,
                      .and_after = and_after});
          },
          "The nth operation from now on (and all after it) fails.",
          py::arg("kind"), py::arg("on"), py::arg("nth"),
          py::arg("errnum") = EIO, py::arg("and_after") = false)
      .def("clear", &FaultInjector::clear)
      .def("count",
           [](const FaultInjector& self, const std::string& on) {
             return self.count(operation_of(on));
           })
      .def_property_readonly("fired", &FaultInjector::fired)
      .def("remove", [](FaultInjector&) { FaultInjector::remove(); });
}

}  // namespace zinf
