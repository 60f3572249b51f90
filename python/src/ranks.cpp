// Several ranks in Python: zinf/_ranks.py finds their group.
#include "adapters/torch/ranks.h"

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/pins.h"
#include "python/src/bindings.h"

namespace py = pybind11;

namespace zinf {
namespace {

std::string broadcast_text(Manager& manager, std::string text) {
  std::uint64_t size = text.size();
  manager.ranks()->broadcast(std::as_writable_bytes(std::span(&size, 1)));
  text.resize(size);
  manager.ranks()->broadcast(std::as_writable_bytes(std::span(text)));
  return text;
}

void broadcast_tensor(Manager& manager, const at::Tensor& tensor) {
  at::Tensor whole = tensor.detach();
  at::Tensor dense = whole.is_non_overlapping_and_dense() && whole.is_cpu()
                         ? whole
                         : whole.cpu().contiguous();
  Pins pins;
  pins.take(dense, Use::kChange);
  manager.ranks()->broadcast(
      {static_cast<std::byte*>(dense.data_ptr()), dense.nbytes()});
  if (!dense.is_same(whole)) whole.copy_(dense);
}

}  // namespace

void bind_ranks(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Ranks, std::unique_ptr<Ranks, py::nodelete>>(
      module, "Ranks", "The ranks that an engine splits its models over.")
      .def_property_readonly("rank", &Ranks::rank)
      .def_property_readonly("size", &Ranks::size)
      .def_property_readonly("passes_since_step", &Ranks::passes_since_step)
      .def("make_up_pass", &Ranks::make_up_pass, py::arg("update"), Released())
      .def("begin_step", &Ranks::begin_step, py::arg("due"), Released())
      .def("end_step", &Ranks::end_step, py::arg("updated"), Released())
      .def("count_step", &Ranks::count_step)
      .def("sum", &Ranks::sum, Released())
      .def("flush", &Ranks::flush, "Keeps all changes of wholes.", Released())
      .def("outdate", &Ranks::outdate, "Slices of these are new.", Released())
      .def(
          "fail",
          [](Ranks& self, const std::string& why) {
            self.fail(Status::error(Code::kInvalid, why));
          },
          Released())
      .def(
          "check",
          [](Ranks& self) {
            throw_if_error(self.gather().exchange().status());
          },
          "Raises when the group has failed.")
      .def("finish", [](Ranks& self) {
        std::string text;
        {
          py::gil_scoped_release released;
          text = self.finish().text();
        }
        return text;
      });
  module.def(
      "broadcast",
      [](Manager& manager, const py::bytes& content) {
        std::string text = content;
        {
          py::gil_scoped_release released;
          text = broadcast_text(manager, std::move(text));
        }
        return py::bytes(text);
      },
      "What rank 0 has.");
  module.def("broadcast_tensor", &broadcast_tensor, Released());
  // Tensors of their own: ours are used by threads that must not need the GIL.
  auto alias = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.detach() : tensor;
  };
  module.def("shard_of", [alias](const at::Tensor& parameter) {
    at::Tensor shard = shard_of(parameter);
    return shard.is_same(parameter) ? shard : alias(shard);
  });
  module.def("shard_grad_of", [alias](const at::Tensor& parameter) {
    py::gil_scoped_release released;
    return alias(shard_grad_of(parameter));
  });
  using Range = std::pair<std::uint64_t, std::uint64_t>;
  module.def("slice_range", [](std::uint64_t elements, int ranks, int rank) {
    const Slice slice = Partition(elements, ranks).slice(rank);
    return Range(slice.begin, slice.end);
  });
  module.def(
      "kept_range",
      [](const at::Tensor& parameter) {
        const Slice slice = Unit::of(parameter)->shard()->mine;
        return Range(slice.begin, slice.end);
      },
      "Of a parameter that is split.");
  module.def("is_split", [](const at::Tensor& tensor) {
    Unit* unit = Unit::of(tensor);
    return unit != nullptr && unit->shard() != nullptr;
  });
}

}  // namespace zinf
