#include "adapters/emulated/run.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "adapters/emulated/calls.h"
#include "adapters/emulated/cpu_aliases.h"
#include "adapters/emulated/device.h"

namespace zinf::emulated {
namespace {

using c10::DispatchKey;
using Values = std::vector<c10::IValue>;

KnownCalls& known_calls() {
  static auto* calls = new KnownCalls;
  return *calls;
}

Access access_of(const c10::FunctionSchema& schema) {
  if (schema.name() == "aten::set_") return Access::kMetadata;
  bool view = !schema.returns().empty() &&
              schema.returns()[0].alias_info() != nullptr &&
              !schema.returns()[0].alias_info()->isWrite();
  return view ? Access::kMetadata : Access::kData;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// As on other devices: the host's tensors are for scalars that are read, and
// for what is read on the host anyway.
void check_device(const c10::FunctionSchema& schema,
                  const c10::Argument& argument, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_privateuseone()) return;
  std::string_view name = schema.name();
  bool host_may = tensor.dim() == 0 ||
                  name.find("index") != std::string_view::npos ||
                  name.find("_foreach") != std::string_view::npos;
  TORCH_CHECK(tensor.is_cpu() && host_may && !is_written(argument),
              schema.name(),
              ": expected all tensors to be on the same device, but found "
              "one on ",
              kDevice, " and one on ", tensor.device());
}

// The value with every tensor in it, those of lists too, changed.
template <typename Change>
c10::IValue with_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(change(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

c10::IValue argument_to_cpu(CpuAliases& aliases,
                            const c10::FunctionSchema& schema,
                            const c10::Argument& argument,
                            const c10::IValue& value) {
  if (value.isStorage()) return aliases.to_cpu(value.toStorage());
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return with_tensors(value, [&](const at::Tensor& tensor) {
    check_device(schema, argument, tensor);
    return aliases.to_cpu(tensor);
  });
}

Values arguments_to_cpu(CpuAliases& aliases, const c10::FunctionSchema& schema,
                        const torch::jit::Stack& stack) {
  auto values = std::span(stack).last(schema.arguments().size());
  Values arguments;
  for (std::size_t i = 0; i < values.size(); ++i) {
    arguments.push_back(
        argument_to_cpu(aliases, schema, schema.arguments()[i], values[i]));
  }
  return arguments;
}

void replace_arguments(torch::jit::Stack& stack,
                       const c10::FunctionSchema& schema, Values results) {
  torch::jit::drop(stack, schema.arguments().size());
  for (c10::IValue& result : results) stack.push_back(std::move(result));
}

// Waits for the stream unless only metadata is looked at.
Outputs run_now(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                Access access) {
  const c10::FunctionSchema& schema = op.schema();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  CpuAliases aliases(access);
  Values values = arguments_to_cpu(aliases, schema, *stack);
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &values);
  Outputs outputs = describe(aliases, values);
  aliases.write_back();
  for (c10::IValue& value : values) {
    value = with_tensors(value, [&](const at::Tensor& tensor) {
      return aliases.to_device(tensor);
    });
  }
  replace_arguments(*stack, schema, std::move(values));
  return outputs;
}

bool is_index_by_position(const c10::FunctionSchema& schema,
                          const torch::jit::Stack& stack) {
  if (schema.name() != "aten::index") return false;
  const c10::IValue& indices = stack.back();
  if (!indices.isOptionalTensorList()) return false;
  auto list = indices.toOptionalTensorVector();
  return std::ranges::all_of(list, [](const auto& index) {
    return !index || !index->defined() || index->scalar_type() == at::kLong ||
           index->scalar_type() == at::kInt;
  });
}

// Whether its results depend on shapes alone, as far as the operator says.
bool may_run_later(const c10::OperatorHandle& op,
                   const torch::jit::Stack& stack) {
  const c10::FunctionSchema& schema = op.schema();
  if (!schema.name().starts_with("aten::")) return false;
  auto draws = [](const c10::Argument& argument) {
    auto type = argument.type();
    if (auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    return type->kind() == c10::TypeKind::GeneratorType;
  };
  if (op.hasTag(at::Tag::nondeterministic_seeded) ||
      op.hasTag(at::Tag::data_dependent_output) ||
      std::ranges::any_of(schema.arguments(), draws)) {
    return false;
  }
  return !op.hasTag(at::Tag::dynamic_output_shape) ||
         is_index_by_position(schema, stack);
}

// Of the operators that count: products of matrices.
double flops_of(std::string_view name, const Values& arguments,
                const Outputs& outputs) {
  if (outputs.tensors.empty()) return 0;
  double results =
      static_cast<double>(c10::multiply_integers(outputs.tensors[0].sizes));
  auto inner = [&](std::size_t argument) {
    return static_cast<double>(arguments[argument].toTensor().size(-1));
  };
  if (name == "aten::mm" || name == "aten::bmm") return 2 * results * inner(0);
  if (name == "aten::addmm" || name == "aten::baddbmm") {
    return 2 * results * inner(1);
  }
  return 0;
}

// The CPU's tensor is read later: what the host does to it meanwhile must not
// be seen.
c10::IValue keep_host_values(const c10::IValue& value,
                             const CpuAliases& aliases) {
  return with_tensors(value, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || aliases.storage_number(tensor.storage()) >= 0) {
      return tensor;
    }
    at::Tensor copy = tensor.detach().clone();
    copy.unsafeGetTensorImpl()->set_wrapped_number(
        tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return copy;
  });
}

// What a kernel that runs later will have returned, in the device's memory.
class Promised {
 public:
  Promised(const Outputs& outputs, const CpuAliases& aliases);

  // As on a stack, by result.
  Values take();
  // Where the kernel's thread finds the new storages.
  const std::vector<void*>& addresses() const { return addresses_; }

 private:
  at::Tensor make(const Output& output, const CpuAliases& aliases) const;

  const Outputs& outputs_;
  std::vector<c10::Storage> storages_;
  std::vector<void*> addresses_;
  std::vector<at::Tensor> tensors_;
};

Promised::Promised(const Outputs& outputs, const CpuAliases& aliases)
    : outputs_(outputs) {
  for (std::size_t bytes : outputs.storages) {
    storages_.push_back(c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes,
        device_allocator().allocate(bytes), &device_allocator(),
        /*resizable=*/true)));
    addresses_.push_back(memory().kernel_address(storages_.back().data()));
  }
  for (const Output& output : outputs.tensors) {
    tensors_.push_back(make(output, aliases));
  }
}

at::Tensor Promised::make(const Output& output,
                          const CpuAliases& aliases) const {
  switch (output.kind) {
    case Output::Kind::kUndefined:
      return {};
    case Output::Kind::kArgument:
      return aliases.argument(output.index);
    case Output::Kind::kNew:
      break;
  }
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storages_[output.index]),
      c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(output.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      output.sizes, output.strides, output.offset);
  return tensor;
}

Values Promised::take() {
  Values values;
  auto next = tensors_.begin();
  for (std::size_t length : outputs_.lengths) {
    if (length == Outputs::kNoList) {
      values.emplace_back(*next++);
      continue;
    }
    c10::List<at::Tensor> list;
    for (std::size_t i = 0; i < length; ++i) list.push_back(*next++);
    values.emplace_back(std::move(list));
  }
  return values;
}

// On the stream's thread.
void use_threads_of_caller(int threads) {
  if (at::get_num_threads() != threads) at::init_num_threads();
}

void run_later(const c10::OperatorHandle& op, torch::jit::Stack* stack,
               const std::shared_ptr<const Outputs>& outputs,
               const CpuAliases& aliases, Values arguments) {
  const c10::FunctionSchema& schema = op.schema();
  Promised promised(*outputs, aliases);
  for (c10::IValue& value : arguments) {
    value = keep_host_values(value, aliases);
  }
  double flops = flops_of(schema.name(), arguments, *outputs);
  auto task = [op, outputs, values = std::move(arguments),
               addresses = promised.addresses(),
               threads = at::get_num_threads()]() mutable {
    use_threads_of_caller(threads);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &values);
    auto storages = new_storages(*outputs, values);
    TORCH_CHECK(storages, "emu: ", op.schema().name(),
                " returned other shapes than before: they depend on data");
    for (std::size_t i = 0; i < storages->size(); ++i) {
      std::size_t bytes = (*storages)[i].nbytes();
      if (bytes > 0) std::memcpy(addresses[i], (*storages)[i].data(), bytes);
    }
  };
  streams().current_stream().enqueue(
      schema.name(), std::move(task),
      time_for(flops, streams().pace().flops_per_second));
  replace_arguments(*stack, schema, promised.take());
}

}  // namespace

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  Access access = access_of(schema);
  if (access == Access::kMetadata || !may_run_later(op, *stack)) {
    run_now(op, stack, access);
    return;
  }
  std::string key;
  std::shared_ptr<const Outputs> outputs;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    CpuAliases aliases(Access::kLater);
    Values arguments = arguments_to_cpu(aliases, schema, *stack);
    key = shape_key(aliases, c10::toString(schema.operator_name()), arguments);
    if (!key.empty()) outputs = known_calls().find(key);
    if (outputs && outputs->known) {
      run_later(op, stack, outputs, aliases, std::move(arguments));
      return;
    }
  }
  Outputs seen = run_now(op, stack, Access::kData);
  if (!key.empty() && !outputs) known_calls().add(key, std::move(seen));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to,
                     bool non_blocking) {
  const at::Tensor* host = from.is_cpu() ? &from : to.is_cpu() ? &to : nullptr;
  const void* address = host != nullptr ? host->const_data_ptr() : nullptr;
  bool later = host == nullptr || (non_blocking && pinned().contains(address));
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  CpuAliases aliases(Access::kLater);
  auto for_task = [&](const at::Tensor& tensor) {
    return &tensor == host ? CpuAliases::unowned(tensor)
                           : aliases.to_cpu(tensor);
  };
  auto task = [cpu_from = for_task(from), cpu_to = for_task(to),
               threads = at::get_num_threads()] {
    use_threads_of_caller(threads);
    at::AutoDispatchBelowADInplaceOrView in_task;
    cpu_to.copy_(cpu_from);
  };
  Pace pace = streams().pace();
  double rate = host == &from ? pace.to_device_bytes_per_second
                : host == &to ? pace.to_host_bytes_per_second
                              : 0;
  const char* name = host == &from ? "to device"
                     : host == &to ? "to host"
                                   : "copy";
  Stream& stream = streams().current_stream();
  Mark done{&stream,
            stream.enqueue(name, std::move(task),
                           time_for(static_cast<double>(from.nbytes()), rate))};
  if (!later) {
    done.wait();
    stream.check();
  } else if (host != nullptr) {
    pinned().record(address, done);
  }
  return to;
}

}  // namespace zinf::emulated
