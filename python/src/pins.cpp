// Content of storages for Python code that reads bytes.
#include "adapters/torch/pins.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "python/src/bindings.h"
#include "zinf/arena.h"

namespace py = pybind11;

namespace zinf {
namespace {

// Inside `with Reading(storage) as content:` the storage leads to its content,
// as it does for an operator that reads it; afterwards the content may leave
// memory again. Of a storage that is not managed it is just its memory.
class Reading {
 public:
  explicit Reading(at::Storage storage) : storage_(std::move(storage)) {}

  void enter() {
    auto pins = std::make_unique<Pins>();
    pins->take(storage_, Use::kRead);
    pins_ = std::move(pins);
  }
  // Nothing of a device's.
  py::memoryview content() const {
    bool readable = storage_.device().is_cpu();
    return py::memoryview::from_memory(
        readable ? storage_.data() : nullptr,
        static_cast<py::ssize_t>(readable ? storage_.nbytes() : 0));
  }
  void exit() { pins_.reset(); }

 private:
  at::Storage storage_;
  std::unique_ptr<Pins> pins_;
};

}  // namespace

void bind_pins(py::module_& module) {
  py::class_<Reading>(module, "Reading")
      .def(py::init<at::Storage>())
      .def("__enter__",
           [](Reading& self) {
             {
               py::gil_scoped_release released;
               self.enter();
             }
             return self.content();
           })
      .def("__exit__", [](Reading& self, const py::args&) {
        py::gil_scoped_release released;
        self.exit();
      });
  module.def("is_counted", [](const at::Tensor& tensor) {
    return tensor.has_storage() &&
           tensor.storage().data_ptr().get_deleter() == &Arena::free;
  });
  module.def("is_managed_storage", [](const at::Storage& storage) {
    return Unit::of(storage.unsafeGetStorageImpl()) != nullptr;
  });
}

}  // namespace zinf
