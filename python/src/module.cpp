// zinf._C: the C++ core as a Python module.
#include <torch/csrc/utils/pybind.h>

#include <exception>

#include "adapters/torch/error.h"
#include "python/src/bindings.h"
#include "zinf/version.h"

namespace py = pybind11;

namespace {

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const zinf::Error& error) {
    PyObject* type = error.code() == zinf::Code::kInvalid ? PyExc_ValueError
                                                          : PyExc_RuntimeError;
    py::set_error(type, error.what());
  }
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.attr("__version__") = zinf::version();
  py::register_local_exception_translator(translate);
  zinf::bind_adam(module);
  zinf::bind_engine(module);
}
