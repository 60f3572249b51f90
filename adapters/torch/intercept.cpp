#include "adapters/torch/intercept.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "adapters/torch/give_way.h"
#include "adapters/torch/init_mode.h"
#include "adapters/torch/keys.h"
#include "adapters/torch/pieces.h"
#include "adapters/torch/pins.h"
#include "adapters/torch/policy.h"

namespace zinf {
namespace {

constexpr c10::DispatchKeySet kBothKeys({kOuterKey, kInnerKey});

std::atomic<std::uint64_t> intercepted = 0;

c10::DispatchKeySet after(c10::DispatchKeySet keys, c10::DispatchKey key) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key);
}

// With its units pinned.
void run_pinned(const c10::OperatorHandle& op, const Policy& policy,
                c10::DispatchKeySet rest, torch::jit::Stack* stack,
                Manager* manager) {
  if (manager == nullptr || !manager->has_device() || !policy.repeats) {
    op.redispatchBoxed(rest, stack);
    return;
  }
  auto view = torch::jit::last(*stack, policy.num_arguments);
  std::vector<c10::IValue> arguments(view.begin(), view.end());
  std::size_t below = stack->size() - arguments.size();
  bool again = false;
  with_room(manager, [&] {
    if (std::exchange(again, true)) {
      stack->resize(below);
      stack->insert(stack->end(), arguments.begin(), arguments.end());
    }
    op.redispatchBoxed(rest, stack);
  });
}

void run(const c10::OperatorHandle& op, const Policy& policy,
         c10::DispatchKeySet rest, torch::jit::Stack* stack) {
  // What a complete operator is made of goes straight to its kernels.
  std::optional<c10::impl::ExcludeDispatchKeyGuard> straight;
  if (policy.complete) straight.emplace(kBothKeys);
  if (policy.arguments.empty()) {
    op.redispatchBoxed(rest, stack);
    return;
  }
  Pins pins;
  auto arguments = torch::jit::last(*stack, policy.num_arguments);
  bool changes = !policy.changes_if || arguments[*policy.changes_if].toBool();
  for (const ArgumentUse& use : policy.arguments) {
    bool reads = use.only_if && !changes;
    pins.add(arguments[use.index], reads ? Use::kRead : use.use);
  }
  pins.settle_if_short();
  pins.hold();
  if (!policy.trusted) pins.watch_pointers();
  run_pinned(op, policy, rest, stack, pins.manager());
}

void outer(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
           torch::jit::Stack* stack) {
  intercepted.fetch_add(1, std::memory_order_relaxed);
  const Policy& policy = policy_of(op);
  c10::DispatchKeySet rest = after(keys, kOuterKey);
  if (InitMode::active()) {
    InitMode::Inside inside;
    run(op, policy, rest.remove(kInnerKey), stack);
    inside.adopt_results(op, *stack);
    return;
  }
  // Lists are cut below autograd, by the inner key.
  if (policy.pieces != Policy::Pieces::kNone) {
    op.redispatchBoxed(rest, stack);
    return;
  }
  run(op, policy, rest.remove(kInnerKey), stack);
}

void inner(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
           torch::jit::Stack* stack) {
  intercepted.fetch_add(1, std::memory_order_relaxed);
  const Policy& policy = policy_of(op);
  c10::DispatchKeySet rest = after(keys, kInnerKey);
  if (policy.pieces != Policy::Pieces::kNone &&
      run_in_pieces(op, policy, rest, stack)) {
    return;
  }
  run(op, policy, rest, stack);
}

}  // namespace

// Torch gives a key's slot to a CompositeExplicit kernel rather than to the
// key's fallback; a kernel of the operator's own comes first.
std::int64_t wire_operators() {
  static std::mutex mutex;
  static auto* handles = new std::vector<c10::RegistrationHandleRAII>();
  std::lock_guard lock(mutex);
  auto& dispatcher = c10::Dispatcher::singleton();
  std::int64_t count = 0;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(kInnerKey)) {
      continue;
    }
    using c10::DispatchKey;
    if (!op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(
            DispatchKey::CompositeExplicitAutogradNonFunctional)) {
      continue;
    }
    handles->push_back(dispatcher.registerImpl(
        name, kInnerKey, c10::KernelFunction::makeFromBoxedFunction<&inner>(),
        std::nullopt, nullptr, "zinf"));
    ++count;
  }
  return count;
}

std::uint64_t num_intercepted() { return intercepted; }

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&outer>());
}
TORCH_LIBRARY_IMPL(_, CustomRNGKeyId, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&inner>());
}

}  // namespace zinf
