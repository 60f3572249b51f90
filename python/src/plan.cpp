// engine.plan(): zinf/_plan.py joins it.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "adapters/torch/error.h"
#include "adapters/torch/host_allocator.h"
#include "adapters/torch/manager.h"
#include "python/src/bindings.h"
#include "zinf/advice_text.h"
#include "zinf/model_config.h"
#include "zinf/this_machine.h"

namespace py = pybind11;

namespace zinf {
namespace {

using Tensors = std::vector<std::pair<std::string, std::vector<std::uint64_t>>>;

Result<plan::ModelShape> shape_of(const Tensors& tensors) {
  std::vector<plan::NamedShape> named;
  named.reserve(tensors.size());
  for (const auto& [name, sizes] : tensors) named.push_back({name, sizes});
  return plan::shape_of(named);
}

// This machine with what the engine may take of it: on NVMe, what it has there
// already and what is free.
Result<plan::Cluster> engine_cluster(Manager& manager) {
  const std::vector<NvmePath>& nvme = manager.options().tier.nvme;
  ZINF_ASSIGN(plan::Cluster cluster,
              plan::measure_this_machine(nvme.empty() ? "" : nvme[0].path));
  cluster.host_bytes = double(process_memory()->budget().usage().limit_bytes);
  if (nvme.empty()) return cluster;
  if (!manager.closed())
    cluster.nvme_bytes += double(manager.tier().stats().nvme_bytes);
  if (nvme[0].limit_bytes > 0)
    cluster.nvme_bytes =
        std::min(cluster.nvme_bytes, double(nvme[0].limit_bytes));
  return cluster;
}

struct Wish {
  std::string name;  // of the model
  Tensors tensors;
  std::string cluster;
  plan::Changes changes;
  std::string precision;
  bool recompute = true;
  double tokens = 0;
  std::string what_if;
};

Result<plan::Request> request_of(Manager& manager, const Wish& wish) {
  plan::Request request;
  ZINF_ASSIGN(request.shape, shape_of(wish.tensors));
  request.shape.name = wish.name;
  request.precision = wish.precision;
  request.recompute = wish.recompute;
  request.tokens = wish.tokens;
  ZINF_ASSIGN(request.cluster, wish.cluster == "this"
                                   ? engine_cluster(manager)
                                   : plan::load_cluster(wish.cluster));
  ZINF_TRY(set_all(request, wish.changes));
  ZINF_TRY(check(request));
  return request;
}

// As people read it, and as JSON.
using Told = std::pair<std::string, std::string>;

Result<Told> tell(Manager& manager, const Wish& wish) {
  ZINF_ASSIGN(const plan::Request request, request_of(manager, wish));
  if (!wish.what_if.empty()) {
    ZINF_ASSIGN(const std::vector<plan::Varied> swept,
                plan::sweep(request, wish.what_if));
    return Told(text_of(swept), json_of(swept));
  }
  ZINF_ASSIGN(const plan::Advice advice, plan::advise(request));
  return Told(text_of(request, advice), json_of(request, advice));
}

}  // namespace

void bind_plan(py::module_& module) {
  module.def(
      "plan",
      [](Manager& manager, std::string name, Tensors tensors,
         std::string cluster, plan::Changes changes, std::string precision,
         bool recompute, double tokens, std::string what_if) {
        const Wish wish = {std::move(name),
                           std::move(tensors),
                           std::move(cluster),
                           std::move(changes),
                           std::move(precision),
                           recompute,
                           tokens,
                           std::move(what_if)};
        py::gil_scoped_release released;
        Result<Told> told = tell(manager, wish);
        throw_if_error(told.status());
        return std::move(told).value();
      },
      py::arg("manager"), py::kw_only(), py::arg("name"), py::arg("tensors"),
      py::arg("cluster"), py::arg("changes"), py::arg("precision"),
      py::arg("recompute"), py::arg("tokens"), py::arg("what_if"));
}

}  // namespace zinf
