// zinf._C: the C++ core as a Python module.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>

#include "adapters/torch/error.h"
#include "python/src/bindings.h"
#include "zinf/version.h"

namespace py = pybind11;

namespace {

PyObject* budget_error = nullptr;
PyObject* look = nullptr;  // called with the text, before it is raised

// What torch turns into a Python exception of that type, wherever an operator
// throws it.
struct PyBudgetError final : torch::PyTorchError {
  explicit PyBudgetError(const std::string& text) { msg = text; }
  // With the GIL, once, where it becomes a Python exception.
  PyObject* python_type() override {
    PyObject* seen = PyObject_CallFunction(look, "s", msg.c_str());
    if (seen == nullptr) PyErr_Clear();  // the text is whole without it
    Py_XDECREF(seen);
    return budget_error;
  }
};

void throw_budget_error(const zinf::Status& status) {
  throw PyBudgetError(status.text());
}

void bind_budget_error(py::module_& module) {
  module.def("set_budget_error",
             [](const py::type& type, const py::function& looks) {
               budget_error = py::object(type).release().ptr();
               look = py::object(looks).release().ptr();
               zinf::set_budget_thrower(&throw_budget_error);
             });
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const zinf::Error& error) {
    PyObject* type = error.code() == zinf::Code::kInvalid ? PyExc_ValueError
                                                          : PyExc_RuntimeError;
    py::set_error(type, error.what());
  } catch (PyBudgetError& error) {
    py::set_error(error.python_type(), error.what());
  }
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.attr("__version__") = zinf::version();
  py::register_local_exception_translator(translate);
  bind_budget_error(module);
  zinf::bind_adam(module);
  zinf::bind_ranks(module);
  zinf::bind_engine(module);
  zinf::bind_optim(module);
  zinf::bind_pins(module);
  zinf::bind_plan(module);
  zinf::bind_faults(module);
}
