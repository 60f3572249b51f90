#include "adapters/torch/api/engine_impl.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <unordered_set>

#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/api/live.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/init_mode.h"
#include "adapters/torch/manager.h"
#include "zinf/bytes.h"
#include "zinf/engine.h"

namespace zinf {
namespace {

constexpr std::uint64_t kAwayBytes = std::uint64_t{1} << 20;

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Status::error(Code::kInvalid, text));
}

std::uint64_t bytes_of(const MemorySize& size, const std::string& name) {
  if (!size.given()) return 0;
  Result<std::uint64_t> bytes = parse_bytes(size.text());
  throw_if_error(bytes.status().in(name));
  if (*bytes == 0) {
    refuse(name + " is \"" + size.text() + "\", must be more than nothing");
  }
  if (*bytes >= std::uint64_t{1} << 63) {
    refuse(name + " is \"" + size.text() + "\", which is more than any memory");
  }
  return *bytes;
}

// The private folder is made when it is needed first, hours later perhaps: so
// it is tried now.
void try_directory(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::string problem;
  if (!fs::is_directory(path, error)) {
    problem = fs::exists(path, error) ? "is not a directory" : "does not exist";
  } else {
    std::string folder = path + "/zinf-probe-XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) {
      problem = "takes no files (" +
                std::error_code(errno, std::generic_category()).message() + ")";
    } else {
      if (!(std::ofstream(folder + "/file") << 'x' << std::flush)) {
        problem = "takes no files";
      }
      fs::remove_all(folder, error);
    }
  }
  if (!problem.empty()) {
    refuse("nvme path \"" + path + "\" " + problem +
           ": name a directory on a disk, with leave to write");
  }
}

std::shared_ptr<Manager> manager_for(const EngineOptions& options) {
  if (options.evict != "auto" && options.evict != "always") {
    refuse("evict is \"" + options.evict +
           "\", must be \"auto\" or \"always\"");
  }
  std::uint64_t device_bytes = bytes_of(options.device_memory, "device_memory");
  if (device_bytes != 0 && !at::getAccelerator(false).has_value()) {
    refuse(
        "device_memory is given, but there is no device: the CPU uses "
        "host_memory");
  }
  for (const std::string& text : options.nvme.paths()) {
    Result<NvmePath> path = parse_nvme_path(text);
    throw_if_error(path.status());
    try_directory(path->path);
  }
  return make_manager(bytes_of(options.host_memory, "host_memory"),
                      device_bytes, options.nvme.paths(), options.weights,
                      options.states, options.evict == "always", options.audit,
                      kAwayBytes,
                      bytes_of(options.nvme_endurance, "nvme_endurance"));
}

}  // namespace

NamedParameters parameters_of(const torch::nn::Module& model) {
  NamedParameters named;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : model.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      named.emplace_back(item.key(), item.value());
    }
  }
  return named;
}

EngineImpl::EngineImpl(const EngineOptions& options)
    : manager_(manager_for(options)) {}

void EngineImpl::check_open() const {
  if (closed_) refuse("the engine is closed");
}

void EngineImpl::begin_init() {
  check_open();
  InitMode::begin(manager_);
}

void EngineImpl::end_init() {
  // C++ tells nobody which tensors were registered as parameters; that they are
  // leaves which require gradients tells it too.
  std::vector<at::Tensor> born = InitMode::born();
  for (const at::Tensor& tensor : born) {
    if (!tensor.requires_grad() || !tensor.is_leaf()) continue;
    if (Unit* unit = Unit::of(tensor)) unit->set_parameter();
  }
  InitMode::end();
  for (const at::Tensor& tensor : born) {
    if (!tensor.requires_grad() || !tensor.is_leaf()) continue;
    adopt_parameter(manager_, tensor, "parameter", 1, true);
  }
}

void EngineImpl::adopt(torch::nn::Module& model) {
  check_open();
  WeakModule weak = model.weak_from_this();
  if (weak.expired()) {
    refuse(
        "adopt() takes a module that is held by a std::shared_ptr or a module "
        "holder: make it with std::make_shared, or TORCH_MODULE");
  }
  for (const auto& [name, parameter] : parameters_of(model)) {
    std::shared_ptr<Manager> manager = manager_of(parameter);
    if (manager != nullptr && manager != manager_) {
      refuse(name +
             " is managed by another engine: release the model there first");
    }
  }
  for (const auto& module : model.modules()) released_.erase(module);
  std::erase_if(adopted_, [](const auto& known) { return known.expired(); });
  if (std::ranges::none_of(adopted_, [&](const auto& known) {
        return known.lock().get() == &model;
      })) {
    adopted_.push_back(weak);
  }
  adopt_parameters_of(model);
}

void EngineImpl::adopt_parameters_of(torch::nn::Module& model) {
  NamedParameters named;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& module : model.named_modules()) {
    if (released_.contains(module.value())) continue;
    for (const auto& own : module.value()->named_parameters(false)) {
      if (!seen.insert(own.value().unsafeGetTensorImpl()).second) continue;
      named.emplace_back(
          module.key().empty() ? own.key() : module.key() + "." + own.key(),
          own.value());
    }
  }
  (void)adopt_parameters(manager_, named);
}

void EngineImpl::refresh(bool all_managed) {
  if (closed_) return;
  if (!all_managed) {
    for (const auto& model : models()) adopt_parameters_of(*model);
  }
  manager_->adopt_offered();
}

Models EngineImpl::models() const {
  Models known;
  for (const WeakModule& weak : adopted_) {
    if (auto model = weak.lock()) known.push_back(model);
  }
  std::unordered_set<const torch::nn::Module*> inside;
  for (const auto& model : known) {
    for (const auto& child : model->modules(/*include_self=*/false)) {
      inside.insert(child.get());
    }
  }
  std::erase_if(known, [&](const auto& model) {
    return inside.contains(model.get()) || released_.contains(model);
  });
  return known;
}

std::vector<AdamW*> EngineImpl::optimizers() const {
  std::unordered_set<const c10::TensorImpl*> mine;
  for (const auto& model : models()) {
    for (const auto& [name, parameter] : parameters_of(*model)) {
      mine.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::vector<AdamW*> optimizers = live_optimizers();
  std::erase_if(optimizers, [&](AdamW* optimizer) {
    return std::ranges::none_of(
        all_parameters(*optimizer), [&](const at::Tensor& parameter) {
          return mine.contains(parameter.unsafeGetTensorImpl());
        });
  });
  return optimizers;
}

void EngineImpl::release(torch::nn::Module& model) {
  NamedParameters parameters = parameters_of(model);
  if (std::ranges::none_of(parameters, [&](const auto& named) {
        return manager_of(named.second) == manager_;
      })) {
    refuse(
        "this engine does not manage the model: it was never adopted, or "
        "released before");
  }
  try {
    for (const auto& [name, parameter] : parameters) release_tensor(parameter);
  } catch (const Error&) {
    adopt_parameters_of(model);
    throw;
  }
  std::vector<AdamW*> mine = optimizers();
  for (const auto& [name, parameter] : parameters) {
    if (parameter.grad().defined()) release_tensor(parameter.grad());
    for (AdamW* optimizer : mine) release_state(*optimizer, parameter);
  }
  for (const auto& module : model.modules()) released_.insert(module);
}

void EngineImpl::close() {
  if (closed_) return;
  closed_ = true;
  close_manager(*manager_);
  for (const auto& model : models()) {
    for (const auto& [name, parameter] : parameters_of(*model)) {
      if (manager_of(parameter) == nullptr) release_tensor(parameter);
    }
  }
}

}  // namespace zinf
