// zinf._emulated: the emulated accelerator as a Python module.
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "adapters/emulated/device.h"

namespace {

namespace py = pybind11;
using zinf::emulated::Pace;
using zinf::emulated::streams;

void start(std::size_t memory_bytes) {
  zinf::Status started = zinf::emulated::start(memory_bytes);
  if (!started.ok()) throw std::runtime_error(started.text());
}

void set_pace(double max_delay, std::uint64_t seed, double to_device,
              double to_host, double flops) {
  auto delay =
      std::chrono::microseconds(static_cast<std::int64_t>(max_delay * 1e6));
  streams().set_pace({.max_delay = delay,
                      .seed = seed,
                      .to_device_bytes_per_second = to_device,
                      .to_host_bytes_per_second = to_host,
                      .flops_per_second = flops});
}

// Per stream: name, begin and end of what it did.
auto trace(bool on) {
  std::vector<std::vector<std::tuple<std::string, std::int64_t, std::int64_t>>>
      lanes;
  for (const auto& spans : streams().trace(on)) {
    auto& lane = lanes.emplace_back();
    for (const auto& span : spans) {
      lane.emplace_back(span.name, span.begin_ns, span.end_ns);
    }
  }
  return lanes;
}

}  // namespace

PYBIND11_MODULE(_emulated, module) {
  module.def("start", &start);
  module.def("set_pace", &set_pace, py::kw_only(), py::arg("max_delay"),
             py::arg("seed"), py::arg("to_device"), py::arg("to_host"),
             py::arg("flops"));
  module.def("trace", &trace);
  module.def(
      "wait", [] { streams().wait_all(); },
      py::call_guard<py::gil_scoped_release>());
  module.def("pinned_bytes", [] {
    auto use = zinf::emulated::pinned().use();
    return std::pair(use.used_bytes, use.peak_bytes);
  });
  module.def("reset_pinned_peak",
             [] { zinf::emulated::pinned().reset_peak_stats(); });
}
