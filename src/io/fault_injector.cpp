#include "zinf/fault_injector.h"

#include <utility>

namespace zinf::io {
namespace {

// The engine makes Ios in many places, none of which takes options for tests.
std::mutex installed_mutex;
std::shared_ptr<FaultInjector> installed_one;

}  // namespace

std::shared_ptr<FaultInjector> FaultInjector::install() {
  std::shared_ptr<FaultInjector> made(new FaultInjector());
  std::lock_guard lock(installed_mutex);
  installed_one = made;
  return made;
}

void FaultInjector::remove() {
  std::lock_guard lock(installed_mutex);
  installed_one = nullptr;
}

std::shared_ptr<FaultInjector> FaultInjector::installed() {
  std::lock_guard lock(installed_mutex);
  return installed_one;
}

void FaultInjector::set(const Fault& fault) {
  std::lock_guard lock(mutex_);
  fault_ = fault;
  counts_ = {};
  fired_ = false;
}

void FaultInjector::clear() {
  std::lock_guard lock(mutex_);
  fault_.reset();
  counts_ = {};
}

std::uint64_t FaultInjector::count(Operation operation) const {
  std::lock_guard lock(mutex_);
  return counts_[static_cast<std::size_t>(operation)];
}

bool FaultInjector::fired() const {
  std::lock_guard lock(mutex_);
  return fired_;
}

std::optional<Fault> FaultInjector::next(Operation operation) {
  std::lock_guard lock(mutex_);
  std::uint64_t count = ++counts_[static_cast<std::size_t>(operation)];
  if (!fault_ || fault_->on != operation) return std::nullopt;
  bool fires =
      count == fault_->nth || (fault_->and_after && count > fault_->nth);
  if (!fires) return std::nullopt;
  fired_ = true;
  return fault_;
}

}  // namespace zinf::io
