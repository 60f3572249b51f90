#include "adapters/torch/later_update.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>

#include <utility>

#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/split_master.h"
#include "adapters/torch/unit.h"

namespace zinf {
namespace {

thread_local bool running = false;

// While one exists, this thread does `which`.
class Running {
 public:
  explicit Running(std::atomic<std::thread::id>& which) : which_(which) {
    which_ = std::this_thread::get_id();
    running = true;
  }
  ~Running() {
    which_ = std::thread::id();
    running = false;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  std::atomic<std::thread::id>& which_;
};

// The tensors have a weight as long as it exists.
class Lent {
 public:
  Lent(AdamTensors& tensors, const at::Tensor& weight) : tensors_(tensors) {
    tensors_.weight = weight;
  }
  ~Lent() { tensors_.weight.reset(); }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

 private:
  AdamTensors& tensors_;
};

// Of what the update changes or reads; `low` is the half of a split master.
std::vector<Unit*> units_of(const AdamItem& item, const at::Tensor& low) {
  const AdamTensors& tensors = item.tensors;
  std::vector<Unit*> units = {Unit::of(tensors.weight), Unit::of(tensors.grad),
                              Unit::of(tensors.exp_avg),
                              Unit::of(tensors.exp_avg_sq)};
  if (tensors.master) units.push_back(Unit::of(*tensors.master));
  if (item.split != nullptr) units.push_back(Unit::of(low));
  return units;
}

bool can_wait(Unit* unit, bool on_device) {
  return unit != nullptr && (on_device || unit->moves()) &&
         !unit->is_consumed() && !unit->seen_from_outside();
}

// On a device, so that it is known when it may be read, and can leave.
void adopt_gradient(const AdamTensors& tensors, std::size_t users) {
  Unit* weight = Unit::of(tensors.weight);
  if (weight == nullptr || weight->manager()->closed()) return;
  weight->manager()->adopt(
      tensors.grad, Role::kGrad,
      {weight->full_name().parameter, std::string(role_name(Role::kGrad))},
      users);
}

std::uint64_t bytes_of(const std::vector<Unit*>& units) {
  std::uint64_t bytes = 0;
  for (const Unit* unit : units) bytes += unit->bytes();
  return bytes;
}

AdamItem without_weight(AdamItem item) {
  item.tensors.weight = at::Tensor();
  return item;
}

}  // namespace

std::shared_ptr<ThreadPool> update_pool() {
  static std::mutex mutex;
  static auto* pool = new std::shared_ptr<ThreadPool>();
  std::lock_guard lock(mutex);
  int threads = at::get_num_threads();
  if (*pool == nullptr || (*pool)->threads() != threads) {
    Result<std::unique_ptr<ThreadPool>> made = ThreadPool::create(threads);
    throw_if_error(made.status());
    *pool = std::move(made).value();
  }
  return *pool;
}

LaterUpdate::LaterUpdate(const AdamOptions& options, const AdamStep& step,
                         const AdamItem& item, std::uint64_t bytes,
                         std::shared_ptr<Manager> manager)
    : options_(options),
      step_(step),
      manager_(std::move(manager)),
      pool_(update_pool()),
      bytes_(bytes),
      storage_(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
          item.tensors.weight.storage().unsafeGetStorageImpl())),
      sizes_(item.tensors.weight.sizes().vec()),
      strides_(item.tensors.weight.strides().vec()),
      offset_(item.tensors.weight.storage_offset()),
      keys_(item.tensors.weight.key_set()),
      dtype_(item.tensors.weight.scalar_type()),
      item_(without_weight(item)) {}

LaterUpdate::~LaterUpdate() {
  if (item_) manager_->note_later(-1);
}

std::shared_ptr<LaterUpdate> LaterUpdate::put_off(const AdamOptions& options,
                                                  const AdamStep& step,
                                                  const AdamItem& item,
                                                  std::size_t users) {
  const AdamTensors& tensors = item.tensors;
  if (tensors.grad.scalar_type() != tensors.weight.scalar_type() ||
      tensors.grad.strides() != tensors.weight.strides()) {
    return nullptr;
  }
  bool on_device = !tensors.weight.is_cpu();
  if (on_device) {
    // What the queue's thread has left, the last step's gradient among it.
    if (Unit* unit = Unit::of(tensors.weight)) unit->manager()->reap();
    adopt_gradient(tensors, users);
  }
  at::Tensor low = item.split == nullptr ? at::Tensor() : item.split->low();
  std::vector<Unit*> units = units_of(item, low);
  for (Unit* unit : units) {
    if (!can_wait(unit, on_device)) return nullptr;
  }
  std::uint64_t bytes = bytes_of(units);
  Manager& manager = *units[0]->manager();
  if (on_device ? !manager.usable() : !manager.may_wait(bytes)) return nullptr;
  for (Unit* unit : units) unit->settle();  // of an older step, or another
  std::shared_ptr<LaterUpdate> later(
      new LaterUpdate(options, step, item, bytes, units[0]->manager()));
  manager.note_later(1);
  manager.list_later(later);
  for (Unit* unit : units) unit->put_off(later, unit == units[0]);
  return later;
}

at::Tensor LaterUpdate::weight() const {
  c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();
  if (storage == nullptr || Unit::of(storage.get()) == nullptr) return {};
  // Not by an operator: this may be inside one.
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(std::move(storage)), keys_,
      c10::scalarTypeToTypeMeta(dtype_));
  impl->set_sizes_and_strides(sizes_, strides_, offset_);
  return at::Tensor(std::move(impl));
}

std::optional<AdamItem> LaterUpdate::end() {
  over_ = true;
  manager_->note_later(-1);
  return std::exchange(item_, std::nullopt);
}

bool LaterUpdate::run() {
  if (runner_.load() == std::this_thread::get_id()) return false;
  std::optional<AdamItem> ended;
  at::Tensor tensor;
  std::lock_guard lock(mutex_);
  if (!item_) return true;
  tensor = weight();
  if (tensor.defined()) {
    Running here(runner_);
    update(tensor);
  }
  ended = end();
  tensor.reset();  // nobody shall count it among the users of its storage
  // To let go of tensors may need the GIL, and whoever has that may wait for
  // this thread.
  if (HostTier::on_own_thread()) {
    manager_->leave(std::make_shared<AdamItem>(std::move(*ended)));
    ended.reset();
  }
  return true;
}

// Not while somebody makes it, or lets go of it.
void LaterUpdate::prepare() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !item_) return;
  const AdamTensors& tensors = item_->tensors;
  if (Unit* grad = Unit::of(tensors.grad)) grad->send_to_host();
  for (const at::Tensor* tensor : {&tensors.exp_avg, &tensors.exp_avg_sq}) {
    if (Unit* unit = Unit::of(*tensor)) unit->prefetch();
  }
  if (!tensors.master) return;
  if (Unit* master = Unit::of(*tensors.master)) master->prefetch();
}

void LaterUpdate::update(const at::Tensor& weight) {
  c10::AutoGradMode no_grad(false);
  Lent lent(item_->tensors, weight);
  try {
    throw_if_error(adam_update_item(options_, step_, *item_, pool_.get()));
  } catch (const Error& error) {
    if (error.code() != Code::kOverBudget) {
      manager_->fail(std::string("an update that step() had put off: ") +
                     error.what());
    }
    throw;
  }
}

bool LaterUpdate::running_here() { return running; }

void LaterUpdate::abandon() {
  std::optional<AdamItem> ended;
  std::lock_guard lock(mutex_);
  if (item_) ended = end();
}

}  // namespace zinf
