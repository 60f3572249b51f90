#include "adapters/torch/unit.h"

#include <cstring>
#include <string_view>
#include <utility>

#include "adapters/torch/audit.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "src/base/align.h"

namespace zinf {
namespace {

void drop_pointer(void* context) {
  static_cast<Unit*>(context)->drop_reference();
}

void on_raw_access(c10::StorageImpl* storage) {
  if (Unit* unit = Unit::of(storage)) unit->escape(storage);
}

std::uint64_t hash_of(std::span<const std::byte> bytes) {
  return std::hash<std::string_view>()(
      {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

// The storage's old memory as a block, counted in the budget.
Block block_of(c10::DataPtr pointer, std::size_t bytes, Manager& manager) {
  c10::Device device = pointer.device();
  struct Owner {
    c10::DataPtr pointer;
    Reservation reservation;
  };
  auto data = static_cast<std::byte*>(pointer.get());
  auto owner = std::make_shared<Owner>(
      Owner{std::move(pointer), manager.count(device, bytes)});
  return {{data, bytes}, std::move(owner)};
}

// The block as a storage's own memory.
c10::DataPtr plain_pointer(Block block, c10::Device device) {
  auto* owner = new std::shared_ptr<void>(std::move(block.owner));
  return {block.bytes.data(), owner,
          [](void* context) {
            delete static_cast<std::shared_ptr<void>*>(context);
          },
          device};
}

}  // namespace

Unit* Unit::of(c10::StorageImpl* storage) {
  c10::DataPtr& pointer = storage->_mutable_data_ptr_no_checks();
  if (pointer.get_deleter() != &drop_pointer) return nullptr;
  return static_cast<Unit*>(pointer.get_context());
}

Unit* Unit::of(const at::TensorBase& tensor) {
  if (!tensor.defined()) return nullptr;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage()) return nullptr;
  c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return storage == nullptr ? nullptr : of(storage);
}

Unit::Unit(std::shared_ptr<Manager> manager,
           const c10::intrusive_ptr<c10::StorageImpl>& storage, Role role,
           std::string name, std::size_t tensors)
    : manager_(std::move(manager)),
      storage_(storage),
      device_(storage->device()),
      bytes_(storage->nbytes()),
      role_(role),
      tensors_(tensors),
      residency_(manager_->residency_of(device_)),
      name_(std::move(name)),
      sentinel_(bytes_, *this) {}

Unit::~Unit() = default;

void Unit::adopt(std::shared_ptr<Manager> manager,
                 c10::intrusive_ptr<c10::StorageImpl> storage, Role role,
                 std::string name, std::size_t tensors) {
  std::unique_ptr<Unit> unit(
      new Unit(manager, storage, role, std::move(name), tensors));
  StateSpec spec{.unit = unit->name_,
                 .state = std::string(role_name(role)),
                 .dtype = "bytes",
                 .shape = {unit->bytes_},
                 .bytes = unit->bytes_};
  Result<StateRef> state = manager->add(spec, role, unit->device_, unit.get());
  throw_if_error(state.status());
  unit->state_ = *state;
  Unit* made = unit.release();

  void* data = storage->_mutable_data_ptr_no_checks().get();
  // Torch's own alignment, which decides about bits (a mapped file has none);
  // a page's for what goes to a disk from where it is.
  bool stays = manager->home_of(role, made->device_) == Home::kMemory;
  bool in_place =
      !made->device_.is_cpu() ||
      is_aligned(data, stays ? std::size_t{64} : std::size_t{kPage});
  made->retain();
  c10::DataPtr old = std::exchange(storage->_mutable_data_ptr_no_checks(),
                                   made->pointer_to(made->sentinel_.address()));
  if (in_place) {
    made->residency_.give(made->state_,
                          block_of(std::move(old), made->bytes_, *manager));
  } else {
    Result<Pin> pin = made->residency_.pin(made->state_, Use::kReplace);
    if (!pin.ok()) {
      storage->set_data_ptr_noswap(std::move(old));
      made->drop_reference();
      throw Error(pin.status());
    }
    std::memcpy(pin->bytes().data(), old.get(), made->bytes_);
  }
  manager->enlist(made);
  made->arm(storage.get());
  made->pin(storage.get(), false);
  made->unpin(storage.get());
  made->drop_reference();
}

c10::DataPtr Unit::pointer_to(void* data) {
  retain();
  return {data, this, &drop_pointer, device_};
}

void Unit::drop_reference() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    manager_->bury(this);
  }
}

// Makes the storage an ordinary one.
void Unit::attach(c10::StorageImpl* storage) {
  sentinel_.clear();
  storage->clear_materializer();
  void* data = pin_.bytes().data();
  if (storage->_mutable_data_ptr_no_checks().get() != data) {
    storage->set_data_ptr_noswap(pointer_to(data));
  }
}

void Unit::arm(c10::StorageImpl* storage) {
  if (!storage->has_materializer()) storage->set_materializer(&on_raw_access);
}

void Unit::detach(c10::StorageImpl* storage) {
  storage->set_data_ptr_noswap(pointer_to(sentinel_.address()));
  arm(storage);
}

void Unit::pin(c10::StorageImpl* storage, bool change) {
  manager_->check_usable(*this);
  retain();
  std::lock_guard lock(mutex_);
  try {
    if (pins_ == 0) {
      Result<Pin> pin =
          residency_.pin(state_, change ? Use::kChange : Use::kRead);
      throw_if_error(pin.status());
      pin_ = std::move(pin).value();
      if (manager_->options().audit && !hash_) note_content();
      attach(storage);
      if (change) hash_.reset();
    } else if (change && change_.empty()) {
      Result<Pin> pin = residency_.pin(state_, Use::kChange);
      throw_if_error(pin.status());
      change_ = std::move(pin).value();
      hash_.reset();
    }
    ++pins_;
  } catch (...) {
    drop_reference();
    throw;
  }
}

void Unit::unpin(c10::StorageImpl* storage) {
  {
    std::lock_guard lock(mutex_);
    if (--pins_ == 0) {
      bool ours = of(storage) == this;
      const ManagerOptions& options = manager_->options();
      if (options.audit && !hash_ && ours) note_content();
      if (ours && !escaped_) arm(storage);
      bool stays = manager_->home_of(role_, device_) == Home::kMemory;
      if (options.evict_always && stays && ours && !escaped_) detach(storage);
      pin_ = {};
      change_ = {};
      if (options.evict_always) residency_.evict(state_);
    }
  }
  drop_reference();
}

void Unit::note_content() {
  if (device_.is_cpu()) hash_ = hash_of(pin_.bytes());
}

bool Unit::used_elsewhere(c10::StorageImpl& storage, std::size_t ours) const {
  std::size_t count = c10::raw::intrusive_ptr::use_count(&storage) - ours;
  // A Python object of the storage that nobody refers to owns a reference.
  if (storage.pyobj_slot()->has_unique_reference()) --count;
  return count > tensors_;
}

void Unit::escape(c10::StorageImpl* storage) {
  manager_->check_usable(*this);
  std::lock_guard lock(mutex_);
  if (pins_ > 0) return;
  ++manager_->escapes;
  if (inside_operator()) {
    ++manager_->violations;
    report_violation(name_);
  }
  Result<Pin> pin = residency_.pin(state_, Use::kChange);
  throw_if_error(pin.status());
  pin_ = std::move(pin).value();
  sentinel_.clear();
  void* data = pin_.bytes().data();
  if (storage->_mutable_data_ptr_no_checks().get() != data) {
    storage->set_data_ptr_noswap(pointer_to(data));
  }
  escaped_ = true;
  if (!used_elsewhere(*storage, 0)) for_good_ = true;
  hash_.reset();
  pin_ = {};
}

Leave Unit::leaving() {
  if (in_forked_child()) return Leave::kKeep;
  DeferBurials defer;
  c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();
  if (!storage || of(storage.get()) != this) return Leave::kDrop;
  if (escaped_) {
    if (for_good_ || used_elsewhere(*storage, 1)) return Leave::kKeep;
    escaped_ = false;
    arm(storage.get());
    return Leave::kChanged;
  }
  if (hash_) {
    void* data = storage->_mutable_data_ptr_no_checks().get();
    if (data != sentinel_.address() &&
        hash_of({static_cast<std::byte*>(data), bytes_}) != *hash_) {
      ++manager_->undeclared_writes;
      hash_.reset();
      return Leave::kChanged;
    }
    hash_.reset();
  }
  detach(storage.get());
  return Leave::kDrop;
}

void Unit::release(c10::StorageImpl* storage) {
  retain();
  {
    std::lock_guard lock(mutex_);
    if (of(storage) == this) {
      Result<Pin> pin = residency_.pin(state_, Use::kRead);
      if (pin.ok()) {
        sentinel_.clear();
        storage->clear_materializer();
        storage->set_data_ptr_noswap(
            plain_pointer(residency_.block(*pin), device_));
      }
    }
  }
  drop_reference();
}

void Unit::forget() { residency_.remove(state_); }
void Unit::prefetch() { residency_.prefetch(state_); }
void Unit::evict() { residency_.evict(state_); }

Status Unit::copy_content(std::byte* to, std::size_t bytes) {
  if (!device_.is_cpu()) {
    return Status::error(Code::kInvalid, name_ + " is on a device");
  }
  std::lock_guard lock(mutex_);
  if (inside_operator()) {
    ++manager_->violations;
    report_violation(name_);
  }
  ZINF_ASSIGN(Pin pin, residency_.pin(state_, Use::kRead));
  std::memcpy(to, pin.bytes().data(), bytes);
  return {};
}

}  // namespace zinf
