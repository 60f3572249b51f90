#include "adapters/torch/audit.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "adapters/torch/keys.h"
#include "zinf/log.h"

namespace zinf {
namespace {

struct Operator {
  const char* name;
  bool managed;  // has an argument with our keys
};
thread_local std::vector<Operator> operators;

bool has_keys(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() && tensor.key_set().has(kInnerKey);
  }
  if (!value.isTensorList()) return false;
  auto elements = value.toListRef();
  return std::any_of(elements.begin(), elements.end(), &has_keys);
}

struct Scope : at::ObserverContext {
  ~Scope() override { operators.pop_back(); }
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  auto inputs = function.inputs();
  operators.push_back(
      {function.name(), std::any_of(inputs.begin(), inputs.end(), &has_keys)});
  return std::make_unique<Scope>();
}

void end(const at::RecordFunction&, at::ObserverContext*) {}

std::mutex mutex;
int users = 0;
at::CallbackHandle handle;

}  // namespace

void start_audit() {
  std::lock_guard lock(mutex);
  if (users++ > 0) return;
  handle = at::addGlobalCallback(at::RecordFunctionCallback(begin, end)
                                     .needsInputs(true)
                                     .scopes({at::RecordScope::FUNCTION}));
}

void stop_audit() {
  std::lock_guard lock(mutex);
  if (--users == 0) at::removeCallback(handle);
}

bool inside_operator() {
  return !operators.empty() && operators.back().managed;
}

void report_violation(const std::string& unit) {
  log(LogLevel::kWarning, "audit: %s met %s outside memory",
      operators.empty() ? "?" : operators.back().name, unit.c_str());
}

}  // namespace zinf
