#include "adapters/torch/checkpoint.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "adapters/torch/pins.h"
#include "adapters/torch/split_master.h"

namespace zinf {
namespace {

constexpr const char* kVersionName = "checkpoint";

at::ScalarType dtype_of(const NamedTensor& named) {
  return named.split ? at::kFloat : named.tensor.scalar_type();
}

std::uint64_t bytes_of(const NamedTensor& named) {
  return static_cast<std::uint64_t>(named.tensor.numel()) *
         c10::elementSize(dtype_of(named));
}

StateSpec spec_of(const NamedTensor& named) {
  StateSpec spec{.unit = named.unit,
                 .state = named.state,
                 .dtype = c10::toString(dtype_of(named)),
                 .shape = {},
                 .bytes = bytes_of(named)};
  for (std::int64_t size : named.tensor.sizes()) {
    spec.shape.push_back(static_cast<std::uint64_t>(size));
  }
  return spec;
}

std::string describe(const StateSpec& spec) {
  std::string text = spec.dtype + "[";
  for (std::size_t i = 0; i < spec.shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(spec.shape[i]);
  }
  return text + "]";
}

Status save_into(Store& store, const std::vector<NamedTensor>& tensors,
                 std::uint64_t step, const std::string& extra) {
  for (const NamedTensor& named : tensors) {
    ZINF_ASSIGN(StateId id, store.define(spec_of(named)));
    at::Tensor tensor =
        named.split ? named.split->copy(named.tensor) : named.tensor;
    Pin on_host;
    Unit* unit = Unit::of(tensor);
    if (unit != nullptr && unit->host_can_read()) {
      ZINF_ASSIGN(on_host, unit->read_on_host());
      tensor = tensor_in(on_host, tensor);
    }
    at::Tensor whole = tensor.detach().cpu().contiguous();
    Pins pins;
    pins.take(whole, Use::kRead);
    std::span<const std::byte> bytes(
        static_cast<const std::byte*>(whole.const_data_ptr()), whole.nbytes());
    ZINF_TRY(store.put(id, bytes).wait().in("save " + spec_of(named).name()));
  }
  ZINF_TRY(store.set_extra(std::as_bytes(std::span(extra))));
  ZINF_TRY(store.commit(step));
  return store.keep(kVersionName);
}

}  // namespace

Result<std::unique_ptr<WrittenTensors>> WrittenTensors::write(
    const std::string& parent, const std::vector<NamedTensor>& tensors,
    std::uint64_t step, const std::string& extra) {
  StoreOptions options;
  options.paths = {{.path = parent}};
  options.files = Files::kUnlinked;
  options.num_states = tensors.size();
  options.extra_bytes = extra.size();
  options.durability = Durability::written_once();
  for (const NamedTensor& named : tensors) {
    options.state_bytes += bytes_of(named);
  }
  std::unique_ptr<WrittenTensors> written(new WrittenTensors());
  ZINF_ASSIGN(written->store_, Store::create(options));
  ZINF_TRY(save_into(*written->store_, tensors, step, extra));
  return written;
}

Status save_tensors(const std::string& path,
                    const std::vector<NamedTensor>& tensors, std::uint64_t step,
                    const std::string& extra) {
  auto parents = tier::NewParents::make(path);
  ZINF_TRY(parents.status().in("save"));
  ZINF_ASSIGN(auto written, WrittenTensors::write(parents->innermost(), tensors,
                                                  step, extra));
  ZINF_TRY(written->link(path).in("save"));
  parents->keep();
  return {};
}

Result<std::unique_ptr<TensorReader>> TensorReader::open(
    const std::string& path) {
  std::unique_ptr<TensorReader> reader(new TensorReader());
  StoreOptions options;
  options.paths = {{.path = path}};
  options.access = Access::kRead;
  options.verify = Verify::kAlways;
  ZINF_ASSIGN(reader->store_, Store::open(options));
  ZINF_ASSIGN(VersionInfo version, reader->store_->find_version(kVersionName));
  ZINF_TRY(version.damage.in("version " + version.label()));
  reader->path_ = path;
  reader->step_ = version.step;
  reader->states_ = reader->store_->states();
  return reader;
}

Result<std::string> TensorReader::extra() {
  ZINF_ASSIGN(std::vector<std::byte> extra, store_->extra());
  return std::string(reinterpret_cast<const char*>(extra.data()), extra.size());
}

const StateSpec* TensorReader::find(const std::string& unit,
                                    const std::string& state) const {
  for (const StateSpec& spec : states_) {
    if (spec.unit == unit && spec.state == state) return &spec;
  }
  return nullptr;
}

Status TensorReader::check(const NamedTensor& tensor) const {
  StateSpec wanted = spec_of(tensor);
  const StateSpec* found = find(tensor.unit, tensor.state);
  if (found == nullptr) {
    return Status::error(Code::kInvalid, path_ + " has no " + wanted.name() +
                                             " (" + describe(wanted) +
                                             "), which the model needs");
  }
  if (*found == wanted) return {};
  return Status::error(Code::kInvalid, path_ + " has " + wanted.name() +
                                           " as " + describe(*found) +
                                           ", the model has it as " +
                                           describe(wanted));
}

Status TensorReader::read(const NamedTensor& named) {
  ZINF_TRY(check(named));
  ZINF_ASSIGN(StateId id, store_->find(named.unit, named.state));
  at::Tensor to =
      named.split ? named.split->join(named.tensor) : named.tensor.detach();
  bool direct = to.is_contiguous() && to.is_cpu();
  at::Tensor whole =
      direct ? to : at::empty(to.sizes(), to.options().device(at::kCPU));
  {
    Pins pins;
    pins.take(whole, Use::kReplace);
    std::span<std::byte> bytes(static_cast<std::byte*>(whole.data_ptr()),
                               whole.nbytes());
    ZINF_TRY(store_->get(id, bytes).wait());
  }
  if (!whole.is_same(to)) to.copy_(whole);
  return {};
}

}  // namespace zinf
