// zinf/adam.h in Python.
#include "adapters/torch/adam.h"

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/split_master.h"
#include "adapters/torch/unit.h"
#include "python/src/bindings.h"
#include "src/base/strf.h"
#include "zinf/thread_pool.h"

namespace py = pybind11;

namespace zinf {
namespace {

constexpr const char* kUpdateDoc =
    R"(One Adam step on CPU tensors, in place. decay is "decoupled" (AdamW) or
"l2" (Adam). A bfloat16 or float16 weight needs its float32 `master`; a bfloat16
weight may have the uint16 `low` half of it instead. `step` is 1 at the first
update. With sum_squares=True the result is the sum of squares of the unscaled,
not yet clipped gradient, otherwise None.)";

WeightDecay parse_decay(const std::string& name) {
  if (name == "decoupled") return WeightDecay::kDecoupled;
  if (name == "l2") return WeightDecay::kL2;
  throw Error(Status::error(
      Code::kInvalid,
      strf("decay is \"%s\", must be \"decoupled\" or \"l2\"", name.c_str())));
}

std::optional<double> py_adam_update(
    const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
    const at::Tensor& exp_avg_sq, std::int64_t step, double lr, double beta1,
    double beta2, double eps, double weight_decay, const std::string& decay,
    bool maximize, bool amsgrad, float inverse_scale, float clip,
    const std::optional<at::Tensor>& master,
    const std::optional<at::Tensor>& low, ThreadPool* pool, bool sum_squares) {
  AdamOptions options = {.lr = lr,
                         .beta1 = beta1,
                         .beta2 = beta2,
                         .eps = eps,
                         .weight_decay = weight_decay,
                         .decay = parse_decay(decay),
                         .maximize = maximize,
                         .amsgrad = amsgrad};
  AdamTensors tensors = {weight, grad, exp_avg, exp_avg_sq, master, low};
  double squares = 0;
  py::gil_scoped_release release;
  throw_if_error(adam_update(
      options, {.step = step, .inverse_scale = inverse_scale, .clip = clip},
      tensors, pool, sum_squares ? &squares : nullptr));
  if (!sum_squares) return std::nullopt;
  return squares;
}

at::Tensor tensor_in(const py::dict& state, const char* name) {
  return state[name].cast<at::Tensor>();
}

// The count of steps, which torch keeps as a float32 tensor.
float* step_in(const py::dict& state) {
  at::Tensor step = tensor_in(state, "step");
  if (step.scalar_type() != at::kFloat || !step.is_cpu() || step.numel() != 1) {
    throw Error(Status::error(Code::kInvalid,
                              "step must be one float32 number on the CPU"));
  }
  return step.mutable_data_ptr<float>();
}

// A parameter with a gradient, and its part of the optimizer's `state`.
using Item = std::pair<at::Tensor, py::dict>;

AdamItem item_of(const at::Tensor& parameter, const py::dict& state) {
  AdamItem item;
  item.tensors.weight = shard_of(parameter).detach();
  item.tensors.grad = shard_grad_of(parameter);
  item.tensors.exp_avg = tensor_in(state, "exp_avg");
  item.tensors.exp_avg_sq = tensor_in(state, "exp_avg_sq");
  if (state.contains("master")) {
    py::object master = state["master"];
    if (py::isinstance<SplitMaster>(master)) {
      item.split = master.cast<std::shared_ptr<SplitMaster>>();
    } else {
      item.tensors.master = master.cast<at::Tensor>();
    }
  }
  item.step = static_cast<std::int64_t>(*step_in(state)) + 1;
  return item;
}

void py_adam_update_all(const std::vector<Item>& items,
                        const AdamOptions& options, float inverse_scale,
                        float clip, bool may_wait) {
  std::vector<AdamItem> all;
  std::vector<float*> steps;  // in the dictionaries, which the caller holds
  for (const auto& [parameter, state] : items) {
    all.push_back(item_of(parameter, state));
    steps.push_back(step_in(state));
  }
  py::gil_scoped_release release;
  throw_if_error(adam_update_all(options, inverse_scale, clip, all, may_wait));
  for (float* step : steps) *step += 1;
  for (const auto& [parameter, state] : items) {
    if (is_split_over_ranks(parameter)) {
      parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace

void bind_adam(py::module_& module) {
  py::class_<ThreadPool>(module, "ThreadPool")
      .def(py::init([](int threads) {
             auto pool = ThreadPool::create(threads);
             throw_if_error(pool.status());
             return std::move(pool).value();
           }),
           py::arg("threads"))
      .def_property_readonly("threads", &ThreadPool::threads);

  py::class_<SplitMaster, std::shared_ptr<SplitMaster>>(
      module, "SplitMaster",
      "The float32 master of a bfloat16 weight, as the 16 bits it lacks.")
      .def(py::init(&SplitMaster::create), py::arg("weight"),
           py::call_guard<py::gil_scoped_release>())
      .def_static("possible", &SplitMaster::possible)
      .def("join", &SplitMaster::join,
           "The master in float32, which it is until the next update.",
           py::arg("weight"), py::call_guard<py::gil_scoped_release>())
      .def("renew", &SplitMaster::renew,
           "The same for somebody who writes all of it: its content is lost.",
           py::arg("weight"), py::call_guard<py::gil_scoped_release>())
      .def("copy", &SplitMaster::copy,
           "The master in float32; it stays split itself.", py::arg("weight"),
           py::call_guard<py::gil_scoped_release>());

  py::class_<AdamOptions>(module, "AdamOptions", "Of AdamW.")
      .def(py::init([](double lr, double beta1, double beta2, double eps,
                       double weight_decay) {
             return AdamOptions{.lr = lr,
                                .beta1 = beta1,
                                .beta2 = beta2,
                                .eps = eps,
                                .weight_decay = weight_decay,
                                .decay = WeightDecay::kDecoupled};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("weight_decay"));

  AdamOptions defaults;
  module.def("adam_update", py_adam_update, kUpdateDoc, py::arg("weight"),
             py::arg("grad"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
             py::kw_only(), py::arg("step"), py::arg("lr") = defaults.lr,
             py::arg("beta1") = defaults.beta1,
             py::arg("beta2") = defaults.beta2, py::arg("eps") = defaults.eps,
             py::arg("weight_decay") = defaults.weight_decay,
             py::arg("decay") = "decoupled", py::arg("maximize") = false,
             py::arg("amsgrad") = false, py::arg("inverse_scale") = 1.0F,
             py::arg("clip") = 1.0F, py::arg("master") = py::none(),
             py::arg("low") = py::none(), py::arg("pool") = py::none(),
             py::arg("sum_squares") = false);

  module.def("adam_update_all", py_adam_update_all,
             "AdamW on many parameters; items are (parameter, its state). With "
             "may_wait some are updated when they are used next.",
             py::arg("items"), py::arg("options"), py::kw_only(),
             py::arg("inverse_scale") = 1.0F, py::arg("clip") = 1.0F,
             py::arg("may_wait") = false);

  module.def(
      "sum_of_squares",
      [](const at::Tensor& grad, float inverse_scale, ThreadPool* pool) {
        py::gil_scoped_release release;
        Result<double> sum = sum_of_squares(grad, inverse_scale, pool);
        throw_if_error(sum.status());
        return sum.value();
      },
      "The sum of squares of the unscaled gradient, in float64.",
      py::arg("grad"), py::kw_only(), py::arg("inverse_scale") = 1.0F,
      py::arg("pool") = py::none());
}

}  // namespace zinf
