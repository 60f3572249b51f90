// One function per binding file, each fills its part of the module.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace zinf {

void bind_adam(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_pins(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_ranks(pybind11::module_& module);
void bind_faults(pybind11::module_& module);

}  // namespace zinf
