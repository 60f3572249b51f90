#include "adapters/torch/error.h"

#include <atomic>

namespace zinf {
namespace {

std::atomic<void (*)(const Status&)> budget_thrower = nullptr;

constexpr const char* kHostAdvice =
    ". That is up to here: engine.probe(step) names the least for the whole "
    "step. Raise host_memory, give nvme= (or more of it), make the batch "
    "smaller, or use gradient checkpointing";
constexpr const char* kDeviceAdvice =
    ". That is up to here: what one operator uses of weights and gradients, or "
    "somebody points to (copy.deepcopy() does; engine.save() does not), must "
    "fit at once. Raise device_memory";

Status advised(const Status& refusal) {
  auto about = [&](const char* budget) {
    return refusal.text().find(budget) != std::string::npos;
  };
  std::string advice = about("budget \"host_memory\"")     ? kHostAdvice
                       : about("budget \"device_memory\"") ? kDeviceAdvice
                                                           : "";
  return Status::error(refusal.code(), refusal.text() + advice);
}

}  // namespace

Error::Error(const Status& status)
    : std::runtime_error(status.text()), code_(status.code()) {}

void throw_if_error(const Status& status) {
  if (status.ok()) return;
  if (status.code() != Code::kOverBudget) throw Error(status);
  if (auto* thrower = budget_thrower.load()) thrower(advised(status));
  throw BudgetError(advised(status));
}

void refuse(const std::string& text) {
  throw Error(Status::error(Code::kInvalid, text));
}

void set_budget_thrower(void (*thrower)(const Status& status)) {
  budget_thrower = thrower;
}

}  // namespace zinf
