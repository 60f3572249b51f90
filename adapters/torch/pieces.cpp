#include "adapters/torch/pieces.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "adapters/torch/give_way.h"
#include "adapters/torch/pins.h"

namespace zinf {
namespace {

using torch::jit::Stack;

c10::IValue slice(const c10::IValue& list, std::size_t begin, std::size_t end) {
  auto elements = list.toListRef();
  c10::impl::GenericList part(list.toList().elementType());
  for (std::size_t i = begin; i < end; ++i) part.push_back(elements[i]);
  return part;
}

std::size_t element_bytes(const std::vector<c10::IValue>& lists,
                          std::size_t i) {
  std::size_t bytes = 0;
  for (const c10::IValue& list : lists) {
    if (Unit* unit = first_unit(list.toListRef()[i])) bytes += unit->bytes();
  }
  return bytes;
}

std::size_t largest_element(const std::vector<c10::IValue>& lists,
                            std::size_t length) {
  std::size_t largest = 0;
  for (std::size_t i = 0; i < length; ++i) {
    largest = std::max(largest, element_bytes(lists, i));
  }
  return largest;
}

// Where pieces begin: every element of a piece but the first fits into it.
std::vector<std::size_t> cut(const std::vector<c10::IValue>& lists,
                             std::size_t length, std::size_t piece_bytes) {
  std::vector<std::size_t> begins;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < length; ++i) {
    std::size_t element = element_bytes(lists, i);
    if (begins.empty() || bytes + element > piece_bytes) {
      begins.push_back(i);
      bytes = 0;
    }
    bytes += element;
  }
  return begins;
}

void append(std::vector<std::vector<c10::IValue>>& results, Stack& outcome) {
  if (results.empty()) results.resize(outcome.size());
  for (std::size_t r = 0; r < outcome.size(); ++r) {
    for (const c10::IValue& element : outcome[r].toListRef()) {
      results[r].push_back(element);
    }
  }
}

bool run_elements(const c10::OperatorHandle& op, const Policy& policy,
                  c10::DispatchKeySet rest, Stack* stack, Unit& unit) {
  auto view = torch::jit::last(*stack, policy.num_arguments);
  std::vector<c10::IValue> arguments(view.begin(), view.end());
  auto first = std::find_if(
      arguments.begin(), arguments.end(),
      [](const c10::IValue& value) { return value.isTensorList(); });
  if (first == arguments.end()) return false;
  std::size_t length = first->toListRef().size();
  std::vector<c10::IValue> lists;
  for (const c10::IValue& value : arguments) {
    if (value.isTensorList() && value.toListRef().size() == length) {
      lists.push_back(value);
    }
  }
  unit.manager()->check_fits(unit.device(), largest_element(lists, length));
  std::vector<std::size_t> begins =
      cut(lists, length, unit.manager()->piece_bytes(unit.device()));
  if (begins.size() < 2) return false;

  torch::jit::drop(*stack, policy.num_arguments);
  std::vector<std::vector<c10::IValue>> results;
  for (std::size_t i = 0; i < begins.size(); ++i) {
    std::size_t end = i + 1 < begins.size() ? begins[i + 1] : length;
    Stack part;
    for (const c10::IValue& value : arguments) {
      bool whole = !value.isList() || value.toListRef().size() != length;
      part.push_back(whole ? value : slice(value, begins[i], end));
    }
    Pins pins;
    for (const ArgumentUse& use : policy.arguments) {
      pins.add(part[use.index], use.use);
    }
    pins.settle_if_short();
    pins.hold();
    op.redispatchBoxed(rest, &part);
    append(results, part);
  }
  for (auto& result : results) {
    c10::impl::GenericList list(c10::TensorType::get());
    for (c10::IValue& element : result) list.push_back(std::move(element));
    stack->emplace_back(std::move(list));
  }
  return true;
}

// Contiguous tensors of one type, shapes equal but for `dim`.
bool can_copy(const std::vector<at::Tensor>& tensors, std::int64_t dim) {
  const at::Tensor& first = tensors[0];
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
    if (!t.defined() || t.layout() != at::kStrided || t.dim() != first.dim() ||
        t.scalar_type() != first.scalar_type() || !t.is_contiguous() ||
        t.device() != first.device()) {
      return false;
    }
    for (std::int64_t i = 0; i < t.dim(); ++i) {
      if (i != dim && t.size(i) != first.size(i)) return false;
    }
    return true;
  });
}

bool run_cat(Stack* stack, Unit& unit) {
  auto arguments = torch::jit::last(*stack, 2);
  std::size_t piece = unit.manager()->piece_bytes(unit.device());
  if (piece > 0 && managed_bytes(arguments[0]) <= piece) return false;
  std::vector<at::Tensor> tensors = arguments[0].toTensorVector();
  std::int64_t dim = arguments[1].toInt();
  if (tensors.size() < 2 || tensors[0].dim() == 0) return false;
  if (dim < 0) dim += tensors[0].dim();
  if (dim < 0 || dim >= tensors[0].dim() || !can_copy(tensors, dim)) {
    return false;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  auto sizes = tensors[0].sizes().vec();
  sizes[dim] = 0;
  for (const at::Tensor& tensor : tensors) sizes[dim] += tensor.size(dim);
  at::Tensor result;
  with_room(unit.manager().get(),
            [&] { result = at::empty(sizes, tensors[0].options()); });
  std::int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    std::int64_t length = tensor.size(dim);
    result.narrow(dim, begin, length).copy_(tensor);
    begin += length;
  }
  torch::jit::drop(*stack, 2);
  stack->emplace_back(std::move(result));
  return true;
}

}  // namespace

bool run_in_pieces(const c10::OperatorHandle& op, const Policy& policy,
                   c10::DispatchKeySet rest, Stack* stack) {
  Unit* unit = nullptr;
  for (const c10::IValue& value :
       torch::jit::last(*stack, policy.num_arguments)) {
    if (unit == nullptr) unit = first_unit(value);
  }
  if (unit == nullptr) return false;
  if (policy.pieces == Policy::Pieces::kCat) return run_cat(stack, *unit);
  return run_elements(op, policy, rest, stack, *unit);
}

}  // namespace zinf
