#include "adapters/torch/api/checkpoint.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <filesystem>
#include <unordered_map>
#include <unordered_set>

#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/api/pickle.h"
#include "adapters/torch/checkpoint.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/split_master.h"

namespace zinf {
namespace {

using c10::IValue;
using c10::impl::GenericDict;
using c10::impl::GenericList;

GenericDict make_dict() {
  return GenericDict(c10::AnyType::get(), c10::AnyType::get());
}
GenericList make_list() { return GenericList(c10::AnyType::get()); }

// Several models are told apart by their number.
std::string prefix_of(const Models& models, std::size_t index) {
  return models.size() == 1 ? "" : std::to_string(index) + ":";
}

std::vector<NamedTensor> model_tensors(const Models& models) {
  std::vector<NamedTensor> tensors;
  for (std::size_t i = 0; i < models.size(); ++i) {
    std::string prefix = prefix_of(models, i);
    for (const auto& [name, parameter] : parameters_of(*models[i])) {
      tensors.push_back({prefix + name, "weight", parameter});
    }
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const auto& item : models[i]->named_buffers()) {
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
      tensors.push_back({prefix + item.key(), "buffer", item.value()});
    }
  }
  return tensors;
}

// The names of all parameters.
class Names {
 public:
  explicit Names(const Models& models) {
    for (std::size_t i = 0; i < models.size(); ++i) {
      for (const auto& [name, parameter] : parameters_of(*models[i])) {
        names_.emplace(parameter.unsafeGetTensorImpl(),
                       prefix_of(models, i) + name);
      }
    }
  }

  const std::string& of(const at::Tensor& parameter) const {
    auto found = names_.find(parameter.unsafeGetTensorImpl());
    if (found == names_.end()) {
      refuse(
          "the optimizer has a parameter that is in none of the engine's "
          "models: engine.adopt() tells it of a model");
    }
    return found->second;
  }

 private:
  std::unordered_map<const c10::TensorImpl*, std::string> names_;
};

using Steps = std::unordered_map<std::string, std::int64_t>;

// Of the first optimizer "exp_avg", of the second "exp_avg:1".
std::string state_name(std::size_t index, const std::string& key) {
  return index == 0 ? key : key + ":" + std::to_string(index);
}

void append_states(const Names& names, const AdamW& optimizer,
                   std::size_t index, std::vector<NamedTensor>& tensors) {
  for (const at::Tensor& parameter : all_parameters(optimizer)) {
    AdamWState* state = find_state(optimizer, parameter);
    if (state == nullptr) continue;
    auto add = [&](const char* key, const at::Tensor& tensor,
                   const std::shared_ptr<SplitMaster>& split) {
      tensors.push_back(
          {names.of(parameter), state_name(index, key), tensor, split});
    };
    add("exp_avg", state->exp_avg, nullptr);
    add("exp_avg_sq", state->exp_avg_sq, nullptr);
    if (state->split != nullptr) add("master", parameter, state->split);
    if (state->master.defined()) add("master", state->master, nullptr);
  }
}

IValue steps_of(const Names& names, const AdamW& optimizer,
                std::int64_t& last) {
  GenericDict steps = make_dict();
  for (const at::Tensor& parameter : all_parameters(optimizer)) {
    AdamWState* state = find_state(optimizer, parameter);
    if (state == nullptr) continue;
    steps.insert(names.of(parameter), state->step);
    last = std::max(last, state->step);
  }
  return steps;
}

IValue groups_of(const Names& names, const AdamW& optimizer) {
  GenericList groups = make_list();
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    GenericList params = make_list();
    for (const at::Tensor& parameter : group.params()) {
      params.push_back(names.of(parameter));
    }
    GenericDict saved = make_dict();
    saved.insert("lr", options.lr());
    saved.insert("betas", IValue(options.betas()));
    saved.insert("eps", options.eps());
    saved.insert("weight_decay", options.weight_decay());
    saved.insert("params", params);
    groups.push_back(saved);
  }
  return groups;
}

at::Tensor random_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(const at::Tensor& state) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// A checkpoint that was opened, and what goes with its tensors.
struct Opened {
  std::unique_ptr<TensorReader> reader;
  GenericDict meta;

  IValue at(const char* key) const { return meta.at(key); }
};

Opened open_checkpoint(const std::string& path) {
  namespace fs = std::filesystem;
  if (!fs::exists(path)) {
    throw Error(Status::error(
        Code::kNotFound,
        "load: " + path +
            " does not exist: name a directory that engine.save() has made"));
  }
  if (!fs::is_regular_file(path + "/volume.zinf")) {
    refuse("load: " + path +
           " is no checkpoint (it has no volume.zinf): name a directory that "
           "engine.save() has made");
  }
  auto reader = TensorReader::open(path);
  throw_if_error(
      reader.status().in("load: " + path + " is no whole checkpoint"));
  Result<std::string> data = (*reader)->extra();
  throw_if_error(data.status().in("load: " + path + " is no whole checkpoint"));
  if (data->empty()) {
    refuse(path +
           " is no checkpoint of an engine, or damaged: see zinf checkpoint "
           "verify");
  }
  Result<IValue> meta = unpickle_value(*data);
  throw_if_error(meta.status().in(
      "load: " + path +
      " has an extra of types that are not known here (a checkpoint of Python "
      "with numpy's types, for example)"));
  if (!meta->isGenericDict()) {
    refuse(path + " is no checkpoint of an engine");
  }
  return {std::move(reader).value(), meta->toGenericDict()};
}

double number(const IValue& value) {
  if (value.isTensor()) return value.toTensor().item<double>();
  return value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
}

Steps read_steps(const IValue& saved) {
  Steps steps;
  for (const auto& item : saved.toGenericDict()) {
    steps.emplace(item.key().toStringRef(), item.value().toInt());
  }
  return steps;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : ", ") + name;
  }
  return "[" + text + "]";
}

void check_groups(const std::string& path, const Names& names,
                  const AdamW& optimizer, const IValue& saved) {
  std::string then;
  for (const IValue& group : saved.toList().vec()) {
    std::vector<std::string> params;
    for (const IValue& name :
         group.toGenericDict().at("params").toList().vec()) {
      params.push_back(name.toStringRef());
    }
    then += joined(params);
  }
  std::string now;
  for (const auto& group : optimizer.param_groups()) {
    std::vector<std::string> params;
    for (const at::Tensor& parameter : group.params()) {
      params.push_back(names.of(parameter));
    }
    now += joined(params);
  }
  if (now != then) {
    refuse(path + " was saved with other parameter groups: " + then +
           " there, " + now + " here");
  }
}

// What a checkpoint must have for an optimizer, as tensors without memory.
void append_expected(const Names& names, const AdamW& optimizer,
                     std::size_t index, const Steps& steps,
                     std::vector<NamedTensor>& expected) {
  for (const at::Tensor& parameter : all_parameters(optimizer)) {
    const std::string& name = names.of(parameter);
    if (!steps.contains(name)) continue;
    at::Tensor like =
        at::empty(parameter.sizes(),
                  at::TensorOptions().dtype(at::kFloat).device(at::kMeta));
    for (const char* key : {"exp_avg", "exp_avg_sq", "master"}) {
      if (std::string_view(key) == "master" && !is_narrow(parameter)) continue;
      expected.push_back({name, state_name(index, key), like});
    }
  }
}

void prepare_states(const Names& names, AdamW& optimizer, const Steps& steps) {
  for (const at::Tensor& parameter : all_parameters(optimizer)) {
    if (!steps.contains(names.of(parameter))) {
      drop_state(optimizer, parameter);
    } else if (find_state(optimizer, parameter) == nullptr) {
      make_state(optimizer, parameter);
    }
  }
}

void restore_groups(const Names& names, AdamW& optimizer, const IValue& groups,
                    const Steps& steps) {
  std::vector<IValue> saved = groups.toList().vec();
  for (std::size_t i = 0; i < saved.size(); ++i) {
    auto& group = optimizer.param_groups()[i];
    auto& options = static_cast<AdamWOptions&>(group.options());
    GenericDict values = saved[i].toGenericDict();
    const auto& betas = values.at("betas").toTupleRef().elements();
    options.lr(number(values.at("lr")))
        .betas({number(betas.at(0)), number(betas.at(1))})
        .eps(number(values.at("eps")))
        .weight_decay(number(values.at("weight_decay")));
    for (const at::Tensor& parameter : group.params()) {
      if (AdamWState* state = find_state(optimizer, parameter)) {
        state->step = steps.at(names.of(parameter));
      }
    }
  }
}

void renew_masters(const AdamW& optimizer) {
  for (const at::Tensor& parameter : all_parameters(optimizer)) {
    AdamWState* state = find_state(optimizer, parameter);
    if (state != nullptr && state->split != nullptr) {
      (void)state->split->renew(parameter);
    }
  }
}

void read_all(TensorReader& reader, const std::vector<NamedTensor>& tensors) {
  for (const NamedTensor& tensor : tensors) {
    throw_if_error(reader.read(tensor));
  }
}

void check_models(const Models& models) {
  if (models.empty()) {
    refuse("the engine knows no model: engine.adopt(model) first");
  }
}

}  // namespace

void save_checkpoint(const std::string& path, const Models& models,
                     const std::vector<AdamW*>& optimizers,
                     const IValue& extra) {
  at::NoGradGuard no_grad;
  check_models(models);
  Result<IValue> plain_extra = plain_value(extra, "extra");
  throw_if_error(plain_extra.status().in("save"));
  for (AdamW* optimizer : optimizers) check_usable(*optimizer);
  Names names(models);
  std::vector<NamedTensor> tensors = model_tensors(models);
  if (tensors.empty()) {
    refuse("save: the engine has no model, so there is nothing to write");
  }
  GenericList groups = make_list();
  GenericList steps = make_list();
  std::int64_t last = 0;
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    groups.push_back(groups_of(names, *optimizers[i]));
    steps.push_back(steps_of(names, *optimizers[i], last));
    append_states(names, *optimizers[i], i, tensors);
  }
  GenericDict meta = make_dict();
  meta.insert("groups", groups);
  meta.insert("steps", steps);
  meta.insert("rng", random_state());
  meta.insert("python_rng", IValue());
  meta.insert("numpy_rng", IValue());
  meta.insert("extra", *plain_extra);
  Result<std::string> data = pickle_value(meta);
  throw_if_error(data.status().in("save"));
  throw_if_error(
      save_tensors(path, tensors, static_cast<std::uint64_t>(last), *data));
}

std::string unfinished(const std::string& path) {
  return "engine.load(\"" + path + "\") was not finished";
}

Loaded load_checkpoint(const std::string& path, const Models& models,
                       const std::vector<AdamW*>& optimizers, Manager& manager,
                       bool& begun) {
  at::NoGradGuard no_grad;
  check_models(models);
  Opened opened = open_checkpoint(path);
  std::vector<IValue> groups = opened.at("groups").toList().vec();
  if (groups.size() != optimizers.size()) {
    refuse(path + " was saved with " + std::to_string(groups.size()) +
           " optimizers, there are " + std::to_string(optimizers.size()));
  }
  Names names(models);
  std::vector<Steps> steps;
  for (const IValue& saved : opened.at("steps").toList().vec()) {
    steps.push_back(read_steps(saved));
  }
  std::vector<NamedTensor> tensors = model_tensors(models);
  std::vector<NamedTensor> expected = tensors;
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    check_groups(path, names, *optimizers[i], groups[i]);
    append_expected(names, *optimizers[i], i, steps.at(i), expected);
  }
  for (const NamedTensor& tensor : expected) {
    throw_if_error(opened.reader->check(tensor));
  }

  begun = true;
  for (AdamW* optimizer : optimizers) {
    AdamWImpl::of(*optimizer).failure = unfinished(path);
  }
  // What could not be read or written before is whole again when it was
  // replaced: so nothing here may need old content.
  manager.abandon_updates();
  for (AdamW* optimizer : optimizers) renew_masters(*optimizer);
  read_all(*opened.reader, tensors);
  std::vector<NamedTensor> states;
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    prepare_states(names, *optimizers[i], steps[i]);
    append_states(names, *optimizers[i], i, states);
  }
  read_all(*opened.reader, states);
  // Gradients are of a step that the saved run has not begun.
  for (const auto& model : models) model->zero_grad();
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    restore_groups(names, *optimizers[i], groups[i], steps[i]);
    heal(*optimizers[i]);
  }
  set_random_state(opened.at("rng").toTensor());
  return {opened.reader->step(), opened.at("extra")};
}

Loaded load_weights(const std::string& path, const Models& models,
                    const std::vector<AdamW*>& optimizers, Manager& /*manager*/,
                    bool& begun) {
  at::NoGradGuard no_grad;
  check_models(models);
  Opened opened = open_checkpoint(path);
  std::vector<NamedTensor> tensors = model_tensors(models);
  for (const NamedTensor& tensor : tensors) {
    throw_if_error(opened.reader->check(tensor));
  }
  begun = true;
  std::vector<std::string> failures;
  for (AdamW* optimizer : optimizers) {
    failures.push_back(
        std::exchange(AdamWImpl::of(*optimizer).failure, unfinished(path)));
  }
  read_all(*opened.reader, tensors);
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    AdamWImpl::of(*optimizers[i]).failure = failures[i];
  }
  return {opened.reader->step(), opened.at("extra")};
}

}  // namespace zinf
