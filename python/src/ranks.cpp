// Several ranks in Python: zinf/_ranks.py finds their group.
#include "adapters/torch/ranks.h"

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/share.h"
#include "python/src/bindings.h"

namespace py = pybind11;

namespace zinf {

// Empty when there is none.
static std::string failure_of(const Status& status) {
  return status.ok() ? "" : status.text();
}

void bind_ranks(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Ranks, std::unique_ptr<Ranks, py::nodelete>>(
      module, "Ranks", "The ranks that an engine splits its models over.")
      .def_property_readonly("rank", &Ranks::rank)
      .def_property_readonly("size", &Ranks::size)
      .def("make_up_passes", &Ranks::make_up_passes, py::arg("count"),
           py::arg("update"), py::arg("how"), Released())
      .def("begin_step", &Ranks::begin_step, py::arg("due"), py::arg("how"),
           Released())
      .def("meet", &Ranks::meet, py::arg("what"), py::arg("seconds"),
           "Waits for all ranks.", Released())
      .def("end_step", &Ranks::end_step, py::arg("updated"), Released())
      .def("forget_sums", &Ranks::forget_sums, Released())
      .def("count_step", &Ranks::count_step)
      .def_property_readonly("num_slices", &Ranks::num_slices)
      .def("sum", &Ranks::sum, Released())
      .def("sum_over_slices", &Ranks::sum_over_slices, Released())
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
      .def(
          "failure",
          [](Ranks& self) {
            return failure_of(self.gather().exchange().status());
          },
          "What the group has failed with, or an empty text.")
      .def("finish", [](Ranks& self) {
        py::gil_scoped_release released;
        return failure_of(self.finish());
      });
  module.def(
      "broadcast",
      [](Manager& manager, const py::bytes& content) {
        std::string text = content;
        {
          py::gil_scoped_release released;
          text = broadcast_text(*manager.ranks(), std::move(text));
        }
        return py::bytes(text);
      },
      "What rank 0 has.");
  module.def(
      "share_tensors",
      [](Manager& manager,
         const std::vector<std::pair<std::string, at::Tensor>>& named) {
        share_tensors(*manager.ranks(), named);
      },
      "All ranks get rank 0's values.", Released());
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
  module.def("is_split", &is_split_over_ranks);
}

}  // namespace zinf
