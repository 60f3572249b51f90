#include "adapters/torch/error.h"

#include <atomic>

namespace zinf {
namespace {

std::atomic<void (*)(const Status&)> budget_thrower = nullptr;

}  // namespace

Error::Error(const Status& status)
    : std::runtime_error(status.text()), code_(status.code()) {}

void throw_if_error(const Status& status) {
  if (status.ok()) return;
  if (status.code() != Code::kOverBudget) throw Error(status);
  if (auto* thrower = budget_thrower.load()) thrower(status);
  throw BudgetError(status);
}

void refuse(const std::string& text) {
  throw Error(Status::error(Code::kInvalid, text));
}

void set_budget_thrower(void (*thrower)(const Status& status)) {
  budget_thrower = thrower;
}

}  // namespace zinf
