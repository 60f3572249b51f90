#include "adapters/torch/probe.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <ostream>

#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/training_budget.h"
#include "src/base/align.h"
#include "src/base/strf.h"
#include "zinf/log.h"

namespace zinf {
namespace {

struct UnderWay {
  std::mutex mutex;
  std::weak_ptr<Probe> probe;
};

UnderWay& the_one() {
  static UnderWay& one = *new UnderWay;
  return one;
}

std::string mib(std::uint64_t bytes) {
  return strf("%.1f MiB", static_cast<double>(bytes) / kMiB);
}

Reservation reserved(std::uint64_t bytes) {
  auto reservation = process_memory()->reserve(Tag::kOther, bytes);
  throw_if_error(reservation.status());
  return std::move(reservation).value();
}

// Not in the arena: it would be measured.
at::Tensor copy_outside(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_meta()) {
    return tensor.detach().clone();
  }
  void* memory = std::malloc(std::max<std::size_t>(tensor.nbytes(), 1));
  if (memory == nullptr) throw std::bad_alloc();
  at::Tensor copy = at::from_blob(memory, tensor.sizes(), &std::free,
                                  tensor.options().device(at::kCPU));
  return copy.copy_(tensor.detach());
}

}  // namespace

std::string Need::text() const {
  return strf("the step needs host_memory of %s or more: it %s in %s",
              mib(least_bytes).c_str(), fits() ? "fits" : "does not fit",
              mib(limit_bytes).c_str());
}

std::ostream& operator<<(std::ostream& stream, const Need& need) {
  return stream << need.text();
}

// What the step may change, and what it must not.
struct Probe::Kept {
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    at::Tensor grad;
    std::int64_t version = 0;
  };
  std::vector<Parameter> parameters;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;  // and their content
};

Probe::Probe(std::shared_ptr<Manager> manager) : manager_(std::move(manager)) {}

std::shared_ptr<Probe> Probe::begin(std::shared_ptr<Manager> manager,
                                    NamedParameters parameters,
                                    const std::vector<at::Tensor>& buffers) {
  std::shared_ptr<Probe> probe(new Probe(std::move(manager)));
  {
    std::lock_guard lock(the_one().mutex);
    if (!the_one().probe.expired()) {
      throw Error(Status::error(Code::kUnsupported, "probe() inside probe()"));
    }
    the_one().probe = probe;
  }
  probe->manager_->settle();
  probe->keep(std::move(parameters), buffers);
  start_measuring(*probe->manager_);
  probe->measuring_ = true;
  return probe;
}

std::shared_ptr<Probe> Probe::under_way() {
  std::lock_guard lock(the_one().mutex);
  std::shared_ptr<Probe> probe = the_one().probe.lock();
  return probe != nullptr && probe->measuring_ ? probe : nullptr;
}

Probe::~Probe() {
  try {
    end();
  } catch (const std::exception& error) {
    log(LogLevel::kError, "the end of engine.probe(): %s", error.what());
  }
}

void Probe::keep(NamedParameters parameters,
                 const std::vector<at::Tensor>& buffers) {
  at::NoGradGuard no_grad;
  kept_ = std::make_unique<Kept>();
  for (const at::Tensor& buffer : buffers) {
    // An expanded one cannot be written.
    if (at::has_internal_overlap(buffer) == at::MemOverlap::Yes) continue;
    kept_->buffers.emplace_back(buffer, copy_outside(buffer));
  }
  for (auto& [name, tensor] : parameters) {
    kept_->parameters.push_back(
        {std::move(name), tensor, tensor.grad(), tensor._version()});
    tensor.mutable_grad() = at::Tensor();
  }
}

void Probe::put_back() {
  at::NoGradGuard no_grad;
  for (const auto& parameter : kept_->parameters) {
    parameter.tensor.mutable_grad() = parameter.grad;
  }
  for (const auto& [buffer, content] : kept_->buffers) buffer.copy_(content);
}

void Probe::hold_states(const std::vector<at::Tensor>& fresh, bool split) {
  for (const at::Tensor& parameter : fresh) hold(parameter, split);
}

void Probe::step(const std::vector<at::Tensor>& due,
                 const std::vector<at::Tensor>& fresh, bool split) {
  manager_->adopt_offered();
  hold_states(fresh, split);
  std::uint64_t most = 0;
  for (const at::Tensor& parameter : due) {
    if (Unit::of(parameter) == nullptr) continue;
    most = std::max(most, update_bytes(parameter, split).moving);
  }
  reserved(most);
}

void Probe::update(const at::Tensor& parameter, bool is_fresh, bool split) {
  if (is_fresh) hold(parameter, split);
  UpdateBytes bytes = update_bytes(parameter, split);
  reserved(bytes.moving - bytes.grad);
}

// Memory for the states that its first update would make, if those stay.
void Probe::hold(const at::Tensor& parameter, bool split) {
  if (Unit::of(parameter) == nullptr) return;
  if (!states_.insert(parameter.unsafeGetTensorImpl()).second) return;
  held_.push_back(reserved(update_bytes(parameter, split).new_states));
}

Need Probe::end() {
  if (!measuring_.exchange(false)) return need_;
  held_.clear();
  std::uint64_t least = manager_->tier().stop_measuring();
  // Pieces of memory fit together differently from run to run.
  least += std::max<std::uint64_t>(least / 32, 2 * std::uint64_t{kHugePage});
  need_ = {.least_bytes = least,
           .limit_bytes = process_memory()->budget().usage().limit_bytes};
  put_back();
  return need_;
}

void Probe::check_weights() const {
  for (const auto& parameter : kept_->parameters) {
    if (parameter.tensor._version() == parameter.version) continue;
    throw Error(Status::error(
        Code::kUnsupported,
        "the probed step has changed " + parameter.name +
            ", and it stays so: probe() only holds back the updates of "
            "zinf.AdamW, leave another optimizer's step() out of it"));
  }
}

}  // namespace zinf
