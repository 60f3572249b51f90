// zinf._emulated: the emulated accelerator as a Python module.
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>

#include "adapters/emulated/device.h"

PYBIND11_MODULE(_emulated, module) {
  module.def("start", [](std::size_t memory_bytes) {
    zinf::Status started = zinf::emulated::start(memory_bytes);
    if (!started.ok()) throw std::runtime_error(started.text());
  });
}
