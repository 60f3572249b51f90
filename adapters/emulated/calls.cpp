#include "adapters/emulated/calls.h"

#include <algorithm>
#include <utility>

namespace zinf::emulated {
namespace {

// Builds the text of a call.
class Key {
 public:
  Key(const CpuAliases& aliases, const std::string& name)
      : aliases_(aliases), text_(name) {}

  // False when it cannot be told how shapes depend on the value.
  bool add(const c10::IValue& value);
  std::string take() { return std::move(text_); }

 private:
  void add(std::int64_t number) { text_ += ' ' + std::to_string(number); }
  void add(at::IntArrayRef numbers) {
    text_ += '[';
    for (std::int64_t number : numbers) add(number);
    text_ += ']';
  }
  void add(const at::Tensor& tensor);

  const CpuAliases& aliases_;
  std::string text_;
};

void Key::add(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    text_ += " undefined";
    return;
  }
  text_ += " t";
  add(static_cast<std::int64_t>(tensor.scalar_type()));
  add(tensor.sizes());
  add(tensor.strides());
  add(tensor.storage_offset());
  add(aliases_.storage_number(tensor.storage()));
  add(tensor.requires_grad() + 2 * tensor.is_conj() + 4 * tensor.is_neg() +
      8 * tensor.unsafeGetTensorImpl()->is_wrapped_number());
}

bool Key::add(const c10::IValue& value) {
  if (value.isTensor()) {
    add(value.toTensor());
  } else if (value.isTensorList()) {
    text_ += " list";
    for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
  } else if (value.isOptionalTensorList()) {
    text_ += " list";
    for (const auto& tensor : value.toOptionalTensorVector()) {
      add(tensor.value_or(at::Tensor()));
    }
  } else if (value.isInt() || value.isBool()) {
    add(value.isInt() ? value.toInt() : std::int64_t{value.toBool()});
  } else if (value.isIntList()) {
    add(at::IntArrayRef(value.toIntVector()));
  } else if (value.isBoolList()) {
    for (bool flag : value.toBoolList()) add(std::int64_t{flag});
  } else if (value.isString()) {
    text_ += " \"" + value.toStringRef() + '"';
  } else if (value.isNone()) {
    text_ += " none";
  } else if (value.isDouble() || value.isDoubleList() || value.isDevice()) {
    text_ += " any";
  } else {
    return false;
  }
  return true;
}

// Every tensor among the results, those of lists too, and undefined ones. False
// when there is something else.
bool collect(std::span<const c10::IValue> results,
             std::vector<at::Tensor>& tensors,
             std::vector<std::size_t>& lengths) {
  for (const c10::IValue& value : results) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
      lengths.push_back(Outputs::kNoList);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      tensors.insert(tensors.end(), list.begin(), list.end());
      lengths.push_back(list.size());
    } else {
      return false;
    }
  }
  return true;
}

// Its number among the storages, where it is added if it is new.
std::size_t number_of(const c10::Storage& storage,
                      std::vector<c10::Storage>& storages) {
  auto same = std::ranges::find_if(storages, [&](const c10::Storage& known) {
    return known.is_alias_of(storage);
  });
  if (same == storages.end()) {
    storages.push_back(storage);
    return storages.size() - 1;
  }
  return static_cast<std::size_t>(same - storages.begin());
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_conj() &&
         !tensor.is_neg();
}

// A new tensor.
Output describe_new(const at::Tensor& tensor, std::size_t storage) {
  return {.kind = Output::Kind::kNew,
          .index = storage,
          .dtype = tensor.scalar_type(),
          .sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .offset = tensor.storage_offset()};
}

bool same(const Output& a, const Output& b) {
  return a.index == b.index && a.dtype == b.dtype && a.sizes == b.sizes &&
         a.strides == b.strides && a.offset == b.offset;
}

}  // namespace

Outputs describe(const CpuAliases& aliases,
                 std::span<const c10::IValue> results) {
  Outputs outputs;
  std::vector<at::Tensor> tensors;
  if (aliases.changed() || !collect(results, tensors, outputs.lengths)) {
    return outputs;
  }
  std::vector<c10::Storage> storages;
  for (const at::Tensor& tensor : tensors) {
    Output output;
    if (!tensor.defined()) {
      output.kind = Output::Kind::kUndefined;
    } else if (auto argument = aliases.argument_number(tensor)) {
      output = {.kind = Output::Kind::kArgument, .index = *argument};
    } else if (is_plain(tensor) &&
               aliases.storage_number(tensor.storage()) < 0) {
      output = describe_new(tensor, number_of(tensor.storage(), storages));
    } else {
      return outputs;
    }
    outputs.tensors.push_back(std::move(output));
  }
  for (const auto& storage : storages) {
    outputs.storages.push_back(storage.nbytes());
  }
  outputs.known = true;
  return outputs;
}

std::optional<std::vector<c10::Storage>> new_storages(
    const Outputs& expected, std::span<const c10::IValue> results) {
  std::vector<at::Tensor> tensors;
  std::vector<std::size_t> lengths;
  if (!collect(results, tensors, lengths) || lengths != expected.lengths ||
      tensors.size() != expected.tensors.size()) {
    return std::nullopt;
  }
  std::vector<c10::Storage> storages;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Output& output = expected.tensors[i];
    if (tensors[i].defined() == (output.kind == Output::Kind::kUndefined)) {
      return std::nullopt;
    }
    if (output.kind != Output::Kind::kNew) continue;
    std::size_t number = number_of(tensors[i].storage(), storages);
    if (!is_plain(tensors[i]) ||
        !same(describe_new(tensors[i], number), output)) {
      return std::nullopt;
    }
  }
  for (std::size_t i = 0; i < storages.size(); ++i) {
    if (storages[i].nbytes() != expected.storages[i]) return std::nullopt;
  }
  return storages;
}

std::string shape_key(const CpuAliases& aliases, const std::string& name,
                      std::span<const c10::IValue> arguments) {
  Key key(aliases, name);
  bool known = std::ranges::all_of(
      arguments, [&](const c10::IValue& value) { return key.add(value); });
  return known ? key.take() : std::string();
}

std::shared_ptr<const Outputs> KnownCalls::find(const std::string& key) const {
  MutexLock lock(mutex_);
  auto known = calls_.find(key);
  return known == calls_.end() ? nullptr : known->second;
}

void KnownCalls::add(const std::string& key, Outputs outputs) {
  auto shared = std::make_shared<const Outputs>(std::move(outputs));
  MutexLock lock(mutex_);
  calls_[key] = std::move(shared);
}

}  // namespace zinf::emulated
