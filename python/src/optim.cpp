// What zinf/optim.py shares with the C++ AdamW.
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/backward.h"
#include "python/src/bindings.h"
#include "src/base/interrupts.h"

namespace py = pybind11;

namespace zinf {
namespace {

void py_check_options(double lr, const AdamWOptions::Betas& betas, double eps,
                      double weight_decay, std::optional<double> max_grad_norm,
                      const std::string& update, const std::string& master,
                      std::int64_t micro_batches) {
  check_options(AdamWOptions(lr)
                    .betas(betas)
                    .eps(eps)
                    .weight_decay(weight_decay)
                    .max_grad_norm(max_grad_norm)
                    .update(update)
                    .master(master)
                    .micro_batches(micro_batches));
}

struct HeldInterrupts {
  std::optional<HoldInterrupts> hold;
};

// Python handles a signal at its next instruction.
void raise_due() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void bind_optim(py::module_& module) {
  set_interrupt_check(&raise_due);
  py::class_<HeldInterrupts>(
      module, "HeldInterrupts",
      "Inside `with` SIGINT waits for the end; a second one does not.")
      .def(py::init<>())
      .def("__enter__", [](HeldInterrupts& self) { self.hold.emplace(); })
      .def("__exit__",
           [](HeldInterrupts& self, const py::args&) { self.hold.reset(); });

  module.def("check_adamw_options", &py_check_options,
             "Raises what is wrong with them.", py::kw_only(), py::arg("lr"),
             py::arg("betas"), py::arg("eps"), py::arg("weight_decay"),
             py::arg("max_grad_norm"), py::arg("update"), py::arg("master"),
             py::arg("micro_batches"));

  // With the GIL: they wait for nothing, and call `fail` without locks.
  py::class_<BackwardUpdate, std::shared_ptr<BackwardUpdate>>(
      module, "BackwardUpdate", "The backward passes of one step.")
      .def(py::init<std::int64_t, BackwardUpdate::Update, BackwardUpdate::Fail,
                    BackwardUpdate::How, BackwardUpdate::Finish>(),
           py::arg("micro_batches"), py::arg("update"), py::arg("fail"),
           py::arg("how"), py::arg("finish"))
      .def("watch", &BackwardUpdate::watch, py::arg("leaf"))
      .def("on_gradient", &BackwardUpdate::on_gradient, py::arg("parameter"),
           py::kw_only(), py::arg("waits"),
           py::call_guard<py::gil_scoped_release>())
      .def("defer", &BackwardUpdate::defer, py::arg("parameter"),
           py::call_guard<py::gil_scoped_release>())
      .def("begin_update", &BackwardUpdate::begin_update, py::arg("group"),
           py::arg("options"))
      .def("end_update", &BackwardUpdate::end_update, py::arg("parameter"))
      .def("begun", &BackwardUpdate::begun)
      .def("fixed_options", &BackwardUpdate::fixed_options, py::arg("groups"))
      .def("interrupted", &BackwardUpdate::interrupted)
      .def("check_options", &BackwardUpdate::check_options, py::arg("groups"))
      .def("end_step", &BackwardUpdate::end_step, py::arg("updated"));
}

}  // namespace zinf
