#include "adapters/torch/unit.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "adapters/torch/announcement.h"
#include "adapters/torch/audit.h"
#include "adapters/torch/error.h"
#include "adapters/torch/keys.h"
#include "adapters/torch/later_update.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/ranks.h"
#include "src/base/align.h"
#include "src/base/check.h"
#include "src/tier/checksum.h"
#include "zinf/log.h"

namespace zinf {
namespace {

void drop_pointer(void* context) {
  static_cast<Unit*>(context)->drop_reference();
}

void on_raw_access(c10::StorageImpl* storage) {
  if (Unit* unit = Unit::of(storage)) unit->escape(storage);
}

void on_watched_access(c10::StorageImpl* storage) {
  if (Unit* unit = Unit::of(storage)) unit->note_pointer();
}

// The storage's old memory as a block.
Block block_of(c10::DataPtr pointer, std::size_t bytes,
               Reservation reservation) {
  struct Owner {
    c10::DataPtr pointer;
    Reservation reservation;
  };
  auto data = static_cast<std::byte*>(pointer.get());
  auto owner = std::make_shared<Owner>(
      Owner{std::move(pointer), std::move(reservation)});
  return {{data, bytes}, std::move(owner)};
}

c10::intrusive_ptr<c10::StorageImpl> storage_without_memory(
    std::size_t bytes, c10::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device),
      nullptr, false);
}

// While a fault is served, the thread that waits for it may have the GIL.
thread_local bool serving = false;

struct Serving {
  Serving() { serving = true; }
  ~Serving() { serving = false; }
};

// The unit whose address this thread is about to give out: it does not leave
// before it was used once.
thread_local const Unit* in_hand = nullptr;

struct InHand {
  explicit InHand(const Unit* unit) { in_hand = unit; }
  ~InHand() { in_hand = nullptr; }
};

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

std::uint64_t hash_of(std::span<const std::byte> bytes) {
  return tier::checksum(bytes);
}

std::size_t uses_of(c10::StorageImpl& storage) {
  std::size_t count = c10::raw::intrusive_ptr::use_count(&storage);
  // A Python object of the storage that nobody refers to owns a reference.
  return storage.pyobj_slot()->has_unique_reference() ? count - 1 : count;
}

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
           UnitName name, std::shared_ptr<Shard> shard)
    : manager_(std::move(manager)),
      shard_(std::move(shard)),
      storage_(storage),
      device_(storage->device()),
      link_(manager_->link_of(device_)),
      bytes_(storage->nbytes()),
      role_(role),
      residency_(shard_ != nullptr && device_.is_cpu()
                     ? shard_->ranks.residency()
                     : manager_->residency_of(device_)),
      stays_(shard_ == nullptr &&
             manager_->home_of(role, device_) == Home::kMemory),
      name_(std::move(name)),
      sentinel_(bytes_, *this) {}

Unit::~Unit() = default;

void Unit::adopt(std::shared_ptr<Manager> manager, const at::TensorBase& tensor,
                 Role role, UnitName name, std::shared_ptr<Shard> shard) {
  auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      tensor.storage().unsafeGetStorageImpl());
  std::unique_ptr<Unit> unit(
      new Unit(manager, storage, role, std::move(name), std::move(shard)));
  unit->register_state();
  Unit* made = unit.release();
  made->retain();  // until the end of this function
  manager->enlist(made);
  try {
    made->know(tensor);
    made->take_content(storage.get());
    made->arm(storage.get());
    made->pin(storage.get(), Use::kRead);
    made->unpin(storage.get());
  } catch (...) {
    made->drop_reference();
    throw;
  }
  made->drop_reference();
}

void Unit::register_whole(GatherTier::Content content) {
  std::uint32_t unit =
      role_ == Role::kGrad ? shard_->grad_unit : shard_->weight_unit;
  void* owner = link_ == nullptr ? this : nullptr;
  auto split = shard_->ranks.gather().open(unit, content, owner);
  throw_if_error(split.status());
  split_ = *split;
  state_ = split_.whole;
  if (link_ == nullptr) return;
  auto above = manager_->add_whole(spec(), split_.whole, device_, this);
  throw_if_error(above.status());
  state_ = *above;
}

StateSpec Unit::spec() const {
  return {.unit = name_.parameter,
          .state = name_.state,
          .dtype = "bytes",
          .shape = {bytes_},
          .bytes = bytes_};
}

void Unit::register_state() {
  if (shard_ != nullptr) return register_whole(GatherTier::Content::kNone);
  Result<StateRef> state = manager_->add(spec(), role_, device_, this);
  throw_if_error(state.status());
  state_ = *state;
}

at::Tensor Unit::tensor_of(const c10::intrusive_ptr<c10::StorageImpl>& storage,
                           at::IntArrayRef sizes, at::IntArrayRef strides,
                           at::ScalarType dtype) {
  // init() must not take what is made here for the model's.
  c10::impl::ExcludeDispatchKeyGuard not_ours(kOuterKey);
  storage->set_data_ptr_noswap(pointer_to(sentinel_.address()));
  arm(storage.get());
  at::Tensor tensor =
      at::empty({0}, at::TensorOptions().dtype(dtype).device(device_));
  tensor.set_(c10::Storage(storage), 0, sizes, strides);
  add_keys(*tensor.unsafeGetTensorImpl());
  return tensor;
}

at::Tensor Unit::zeros(std::shared_ptr<Manager> manager, const at::Tensor& like,
                       UnitName name) {
  auto storage = storage_without_memory(like.numel() * sizeof(float), at::kCPU);
  std::unique_ptr<Unit> unit(
      new Unit(manager, storage, Role::kState, std::move(name)));
  unit->register_state();
  unit->residency_.start_as_zeros(unit->state_);
  Unit* made = unit.release();
  made->retain();  // until the end of this function
  manager->enlist(made);
  at::Tensor tensor =
      made->tensor_of(storage, like.sizes(), like.strides(), at::kFloat);
  made->know(tensor);
  made->drop_reference();
  return tensor;
}

at::Tensor Unit::consumed(std::shared_ptr<Manager> manager,
                          const at::Tensor& like, UnitName name) {
  auto storage = storage_without_memory(like.nbytes(), like.device());
  Unit* unit = new Unit(manager, storage, Role::kGrad, std::move(name));
  unit->consumed_ = true;
  unit->retain();  // until the end of this function
  manager->enlist(unit);
  at::Tensor tensor = unit->tensor_of(storage, like.sizes(), like.strides(),
                                      like.scalar_type());
  unit->drop_reference();
  return tensor;
}

at::Tensor Unit::without_content(std::shared_ptr<Manager> manager,
                                 std::int64_t elements, at::ScalarType dtype,
                                 UnitName name, Role role) {
  auto bytes = static_cast<std::size_t>(elements) * c10::elementSize(dtype);
  if (bytes == 0) {
    c10::impl::ExcludeDispatchKeyGuard not_ours(kOuterKey);
    return at::empty({0}, dtype);
  }
  auto storage = storage_without_memory(bytes, at::kCPU);
  std::unique_ptr<Unit> unit(new Unit(manager, storage, role, std::move(name)));
  unit->register_state();
  Unit* made = unit.release();
  made->retain();  // until the end of this function
  manager->enlist(made);
  at::Tensor tensor = made->tensor_of(storage, {elements}, {1}, dtype);
  made->know(tensor);
  made->drop_reference();
  return tensor;
}

at::Tensor Unit::gradient(std::shared_ptr<Manager> manager,
                          const at::Tensor& parameter,
                          std::shared_ptr<Shard> shard) {
  auto storage = storage_without_memory(parameter.nbytes(), parameter.device());
  UnitName name{shard->name, std::string(role_name(Role::kGrad))};
  std::unique_ptr<Unit> unit(new Unit(manager, storage, Role::kGrad,
                                      std::move(name), std::move(shard)));
  unit->register_whole(GatherTier::Content::kInSlices);
  Unit* made = unit.release();
  made->retain();  // until the end of this function
  manager->enlist(made);
  at::Tensor tensor = made->tensor_of(
      storage, parameter.sizes(), parameter.strides(), parameter.scalar_type());
  made->know(tensor);
  made->drop_reference();
  return tensor;
}

void Unit::check_usable() const {
  manager_->check_usable(*this);
  if (!consumed_) return;
  throw Error(Status::error(
      Code::kInvalid,
      name() + " was used by the update inside backward and is gone: for "
               "another backward before step() pass micro_batches= to "
               "zinf.AdamW, after step() call zero_grad() first; to clip pass "
               "max_grad_norm=; to see gradients choose update=\"step\""));
}

// The storage's memory becomes the unit's, or is copied to where it is better.
void Unit::take_content(c10::StorageImpl* storage) {
  void* data = storage->_mutable_data_ptr_no_checks().get();
  // Torch's own alignment, which decides about bits (a mapped file has none);
  // a page's for what goes to a disk from where it is.
  std::size_t alignment = stays_ ? 64 : std::size_t{kPage};
  // What lives long would keep pages of the arena from going back.
  bool in_arena = manager_->tier().memory().arena().owns(data);
  bool short_lived = stays_ || role_ == Role::kGrad || !in_arena;
  if (!device_.is_cpu() || (is_aligned(data, alignment) && short_lived)) {
    Reservation counted = manager_->count(
        storage->_mutable_data_ptr_no_checks(), bytes_, stays_, name());
    c10::DataPtr old = std::exchange(storage->_mutable_data_ptr_no_checks(),
                                     pointer_to(sentinel_.address()));
    Announcement announcement;
    announcement.add(*this, UseKind::kReplace);
    announcement.make();
    residency_.give(
        state_, link_ != nullptr
                    ? link_->take(std::move(old), bytes_, std::move(counted))
                    : block_of(std::move(old), bytes_, std::move(counted)));
    if (shard_ != nullptr) announce_change();
    return;
  }
  Result<Pin> pin = residency_.pin(state_, Use::kReplace);
  throw_if_error(pin.status());
  std::memcpy(pin->bytes().data(), data, bytes_);
  storage->set_data_ptr_noswap(pointer_to(sentinel_.address()));
  if (shard_ != nullptr) announce_change();
}

void Unit::announce_change() {
  if (std::exchange(announced_, true)) return;
  shard_->ranks.announce_change(split_.unit);
}

// Through an address that was given out. On a device nobody can look.
bool Unit::is_edited(std::span<const std::byte> content) const {
  return link_ == nullptr && hash_of(content) != escaped_hash_;
}

void Unit::note_escape(std::span<const std::byte> content) {
  if (link_ == nullptr) escaped_hash_ = hash_of(content);
}

void Unit::look_for_edits() {
  if (!is_edited(pin_.bytes())) return;
  Result<Pin> pin = residency_.pin(state_, Use::kChange);
  throw_if_error(pin.status());
  note_escape(pin_.bytes());
  announce_change();
}

void Unit::note_edits() {
  if (shard_ == nullptr || !seen_from_outside()) return;
  auto storage = storage_.lock();
  if (storage == nullptr) return;
  pin(storage.get(), Use::kRead);  // which looks for them
  unpin(storage.get());
}

void Unit::outdate() {
  if (link_ != nullptr) return outdate_on_device();
  throw_if_error(shard_->ranks.gather().outdate(split_));
  std::lock_guard lock(mutex_);
  if (!escaped_) return;
  Result<Pin> pin = residency_.pin(state_, Use::kRead);
  throw_if_error(pin.status());
  note_escape(pin->bytes());
}

// What somebody uses there becomes new where it is.
void Unit::outdate_on_device() {
  GatherTier& gather = shard_->ranks.gather();
  Status left = residency_.leave(state_);
  if (!left.ok() && left.code() != Code::kInvalid) throw_if_error(left);
  throw_if_error(gather.outdate(split_));
  if (left.ok()) return;
  Result<Pin> here = residency_.pin(state_, Use::kRead);
  throw_if_error(here.status());
  Result<Pin> whole = gather.residency().pin(split_.whole, Use::kRead);
  throw_if_error(whole.status());
  throw_if_error(link_->to_device(here->bytes(), whole->bytes()));
}

// Other ranks wait for the change of a whole, so this waits for its copy.
void Unit::keep_change() {
  if (link_ == nullptr) return residency_.write(state_);
  Status status = residency_.leave(state_);
  bool copied = status.ok() || residency_.place(state_) == Place::kResident;
  if (!copied) shard_->ranks.fail(status);
}

Result<Pin> Unit::pin_on_host(Use use) {
  ZINF_CHECK(link_ != nullptr && shard_ == nullptr, "%s is the host's",
             name().c_str());
  ZINF_TRY(residency_.leave(state_));
  return manager_->tier().residency().pin({residency_.below(state_)}, use);
}

bool Unit::host_can_read() {
  return link_ != nullptr && shard_ == nullptr && !consumed_ &&
         !seen_from_outside();
}

Result<Pin> Unit::read_on_host() {
  check_usable();
  settle();
  ZINF_TRY(residency_.write_and_wait(state_));
  return manager_->tier().residency().pin({residency_.below(state_)},
                                          Use::kRead);
}

void Unit::send_to_host() { residency_.evict(state_); }

void Unit::return_to_device() {
  if (manager_->holds_all(device_)) residency_.prefetch(state_);
}

void Unit::know(const at::TensorBase& tensor) {
  std::lock_guard lock(known_mutex_);
  for (auto& weak : known_) {
    auto known = weak.lock();
    if (known.get() == tensor.unsafeGetTensorImpl()) return;
  }
  known_.emplace_back(tensor.getIntrusivePtr());
}

c10::DataPtr Unit::pointer_to(void* data) {
  retain();
  return {data, this, &drop_pointer, device_};
}

bool Unit::retain_if_alive() {
  int references = references_.load(std::memory_order_relaxed);
  while (references > 0 &&
         !references_.compare_exchange_weak(references, references + 1,
                                            std::memory_order_relaxed)) {
  }
  return references > 0;
}

void Unit::drop_reference() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    manager_->bury(this);
  }
}

// The storage leads to the pinned memory.
void Unit::attach(c10::StorageImpl* storage) {
  sentinel_.clear();
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

void Unit::put_off(const std::shared_ptr<LaterUpdate>& later, bool owns) {
  {
    std::lock_guard known(known_mutex_);
    later_ = later;
    if (owns) own_later_ = later;
    has_later_ = true;
  }
  // Who reads through a pointer must fault again; also where the content never
  // leaves memory.
  std::lock_guard lock(mutex_);
  sentinel_.clear();
  auto storage = storage_.lock();
  bool ours = storage != nullptr && of(storage.get()) == this;
  if (ours && device_.is_cpu() && pins_ == 0 && !escaped_) {
    detach(storage.get());
  }
}

Result<Pin> Unit::pin_unseen(Use use) {
  std::lock_guard lock(mutex_);
  hash_.reset();
  sentinel_.clear();
  return residency_.pin(state_, use);
}

void Unit::settle() {
  if (!has_later_ || in_forked_child()) return;
  std::shared_ptr<LaterUpdate> later;
  {
    std::lock_guard lock(known_mutex_);
    later = later_.lock();
  }
  if (later != nullptr && !later->run()) return;
  {
    std::lock_guard lock(known_mutex_);
    if (later_.lock() != later) return;  // another one came meanwhile
    own_later_.reset();                  // not the last reference
    has_later_ = false;
  }
  // The gradient, if the queue's thread has made it.
  if (link_ != nullptr && !HostTier::on_own_thread()) manager_->reap();
}

Status Unit::settled() {
  try {
    settle();
  } catch (const Error& error) {
    return Status::error(error.code(), error.what());
  } catch (const std::exception& error) {  // a language's own BudgetError
    return Status::error(Code::kOverBudget, error.what());
  }
  return {};
}

bool Unit::seen_from_outside() {
  std::lock_guard lock(mutex_);
  return escaped_;
}

void Unit::pin(c10::StorageImpl* storage, Use use) {
  check_usable();
  settle();
  retain();
  std::lock_guard lock(mutex_);
  try {
    bool change = use != Use::kRead;
    // Whoever watches needs the old content.
    if (use == Use::kReplace) {
      auto watch = watch_.lock();
      if (watch != nullptr && watch->wants_content()) use = Use::kChange;
    }
    if (pins_ == 0) {
      if (link_ != nullptr && manager_->options().on_demand() &&
          residency_.place(state_) == Place::kAbsent) {
        link_->wait_for_computing();
      }
      Result<Pin> pin = residency_.pin(state_, use);
      throw_if_error(pin.status());
      pin_ = std::move(pin).value();
      if (manager_->options().audit && !hash_) note_content();
      attach(storage);
      storage->clear_materializer();
      if (shard_ != nullptr && escaped_) look_for_edits();
    } else if (change && change_.empty()) {
      Result<Pin> pin = residency_.pin(state_, use);
      throw_if_error(pin.status());
      change_ = std::move(pin).value();
    }
    if (link_ != nullptr) link_->before_use(pin_.bytes().data());
    if (change) {
      if (shard_ != nullptr) announce_change();
      tell_watch(pin_.bytes());
      hash_.reset();
    }
    ++pins_;
  } catch (...) {
    if (pins_ == 0) let_go(storage);
    drop_reference();
    throw;
  }
}

void Unit::unpin(c10::StorageImpl* storage) {
  {
    std::lock_guard lock(mutex_);
    if (link_ != nullptr && !escaped_) link_->after_use(pin_.bytes().data());
    sentinel_.clear();  // a copy that was made meanwhile is old now
    if (--pins_ == 0) {
      keep_undeclared(storage);
      if (manager_->options().audit && of(storage) == this) check_content();
      let_go(storage);
    }
  }
  drop_reference();
}

// Nobody has it pinned any more.
void Unit::let_go(c10::StorageImpl* storage) {
  bool always = manager_->options().evict_always;
  change_ = {};
  if (!escaped_ && sentinel_.has_content() && !pin_.empty()) {
    // escaped() has found that nobody has its address any more.
    escaped_ = !residency_.relocate(
        pin_, [&](Block& block) { return sentinel_.take_away(block); });
  }
  // What may leave memory at any moment is not to be read through an address
  // that was asked for in passing.
  if (of(storage) == this) {
    if (!escaped_ && (always || moves())) {
      detach(storage);
    } else if (!escaped_ || !has_unknown_taker_) {
      arm(storage);
    }
  }
  pin_ = {};
  if (std::exchange(announced_, false)) keep_change();
  if (always) residency_.evict(state_);
}

void Unit::watch_edits(std::weak_ptr<EditWatch> watch) {
  std::lock_guard lock(mutex_);
  watch_ = std::move(watch);
}

bool Unit::is_watched_by(const EditWatch* watch) {
  std::lock_guard lock(mutex_);
  return watch_.lock().get() == watch;
}

bool Unit::is_watched() { return !is_watched_by(nullptr); }

bool Unit::escaped(const at::TensorBase& tensor) {
  std::lock_guard lock(mutex_);
  auto storage = storage_.lock();
  std::size_t ours = knows(tensor) ? 2 : 3;  // with `storage` and the pin
  if (!is_taken(*storage, ours)) escaped_ = false;
  return escaped_;
}

bool Unit::knows(const at::TensorBase& tensor) {
  std::lock_guard lock(known_mutex_);
  return std::any_of(known_.begin(), known_.end(), [&](const auto& weak) {
    return weak.lock().get() == tensor.unsafeGetTensorImpl();
  });
}

void Unit::tell_watch(std::span<std::byte> content) {
  if (auto watch = watch_.lock()) watch->before_edit(*this, content);
}

void Unit::tell_end() {
  std::lock_guard lock(mutex_);
  auto watch = watch_.lock();
  if (watch == nullptr) return;
  Result<Pin> pin = residency_.pin(state_, Use::kRead);
  if (pin.ok()) watch->before_end(*this, pin->bytes());
}

void Unit::note_content() {
  if (device_.is_cpu()) hash_ = hash_of(pin_.bytes());
}

// An operator that has only read it must have left it as it was.
void Unit::check_content() {
  std::optional<std::uint64_t> before = std::exchange(hash_, {});
  note_content();
  if (!before || before == hash_ || escaped_) return;
  ++manager_->undeclared_writes;
  (void)residency_.pin(state_, Use::kChange);
}

void Unit::watch_pointer(c10::StorageImpl* storage) {
  std::lock_guard lock(mutex_);
  bool stays = stays_ && shard_ == nullptr && watch_.expired();
  if (escaped_ || (stays && !manager_->options().audit)) return;
  if (storage->has_materializer()) return;      // watched already
  if (pins_ > 1) return note_pointer_locked();  // others use the storage now
  storage->set_materializer(&on_watched_access);
}

void Unit::note_pointer() {
  std::lock_guard lock(mutex_);
  note_pointer_locked();
}

void Unit::note_pointer_locked() {
  if (pins_ == 0 || pointer_hash_ || !change_.empty()) return;
  if (link_ != nullptr && shard_ == nullptr) {
    Result<Pin> pin = residency_.pin(state_, Use::kChange);
    throw_if_error(pin.status());
    change_ = std::move(pin).value();
  } else {
    Result<std::uint64_t> hash = content_hash();
    throw_if_error(hash.status());
    pointer_hash_ = *hash;
  }
  tell_watch(pin_.bytes());
}

Result<std::uint64_t> Unit::content_hash() {
  return link_ == nullptr ? hash_of(pin_.bytes()) : link_->hash(pin_.bytes());
}

// See Note [Undeclared writes].
void Unit::keep_undeclared(c10::StorageImpl* storage) {
  if (of(storage) == this && !escaped_) storage->clear_materializer();
  auto before = std::exchange(pointer_hash_, {});
  if (!before || !change_.empty()) return;
  Result<std::uint64_t> now = content_hash();
  Status status = now.status();
  if (status.ok() && *now == *before) return;
  if (status.ok()) status = residency_.pin(state_, Use::kChange).status();
  if (!status.ok()) return manager_->fail(status.text());
  hash_.reset();
  if (shard_ != nullptr) announce_change();
}

bool Unit::used_elsewhere(c10::StorageImpl& storage, std::size_t ours) {
  std::size_t expected = ours;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> known;
  {
    std::lock_guard lock(known_mutex_);
    known = known_;
  }
  for (auto& weak : known) {
    auto tensor = weak.lock();
    if (tensor && tensor->has_storage() &&
        tensor->unsafe_storage().unsafeGetStorageImpl() == &storage) {
      ++expected;
    }
  }
  // Only a Python object of the storage makes a difference between the two.
  std::size_t most = c10::raw::intrusive_ptr::use_count(&storage);
  return most == expected + 1 ? uses_of(storage) > expected : most > expected;
}

void* Unit::own_address() {
  check_usable();
  if (!has_own_addresses()) return nullptr;
  shown_ = true;
  return sentinel_.address();
}

void Unit::escape(c10::StorageImpl* storage) {
  check_usable();
  settle();
  std::lock_guard lock(mutex_);
  throw_if_error(let_out(storage, Taker::kUnknown));
}

void Unit::hold_for(const at::TensorBase& tensor) {
  if (!leaves_addresses()) return;
  check_usable();
  settle();
  std::lock_guard lock(mutex_);
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  bool watched = storage->has_materializer() || pointer_hash_;
  if (pins_ > 0 && watched) return;
  {
    std::lock_guard known(known_mutex_);
    takers_.emplace_back(tensor.getIntrusivePtr());
  }
  shown_ = true;
  throw_if_error(let_out(storage, Taker::kTensor));
  storage->clear_materializer();
}

bool Unit::has_takers() {
  std::lock_guard lock(known_mutex_);
  std::erase_if(takers_, [](const auto& weak) { return weak.expired(); });
  return !takers_.empty();
}

bool Unit::is_taken(c10::StorageImpl& storage, std::size_t ours) {
  if (for_good_ || has_takers()) return true;
  return has_unknown_taker_ && used_elsewhere(storage, ours);
}

Result<Reservation> Unit::pay_for_move() {
  HostMemory& memory = manager_->tier().memory();
  std::size_t bytes = sentinel_.memory_bytes();
  Result<Reservation> paid = memory.reserve(Tag::kUnit, bytes);
  if (paid.ok() || paid.status().code() != Code::kOverBudget) return paid;
  BudgetUsage now = memory.budget().usage();
  bool fits = now.total.used_bytes + bytes <= now.limit_bytes + bytes_;
  if (!fits) {
    return paid.status().in(spec().name() +
                            ": nothing more can leave memory, and it does "
                            "not fit");
  }
  return memory.reserve_or_exceed(Tag::kUnit, bytes);
}

Status Unit::move_to_own_addresses(Pin& pin, Reservation paid) {
  Block block = sentinel_.put_content(pin.bytes(), std::move(paid));
  if (block.owner == nullptr) {
    return Status::error(Code::kUnsupported,
                         name() +
                             ": no memory can be mapped at its addresses "
                             "(see vm.max_map_count)");
  }
  residency_.replace(pin, std::move(block));
  shown_ = true;
  return {};
}

Status Unit::let_out(c10::StorageImpl* storage, Taker taker) {
  InHand keep(this);
  ++manager_->escapes;
  if (inside_operator() && !shown_) {
    ++manager_->violations;
    report_violation(name());
  }
  // Who only reads a whole must not announce a change that others do not make.
  bool whole = shard_ != nullptr;
  ZINF_ASSIGN(Pin pin,
              residency_.pin(state_, whole ? Use::kRead : Use::kChange));
  if (whole) note_escape(pin.bytes());
  if (link_ != nullptr) link_->before_use(pin.bytes().data());
  tell_watch(pin.bytes());
  // An operator of another thread may be writing where the content is now. One
  // that writes through its own address has asked for that.
  bool moves = pins_ == 0 || taker == Taker::kTouch;
  if (has_own_addresses() && moves && !sentinel_.has_content()) {
    ZINF_ASSIGN(Reservation paid, pay_for_move());
    ZINF_TRY(move_to_own_addresses(pin, std::move(paid)));
  }
  // Before the pin ends: then the unit may be asked to leave.
  bool had_unknown_taker = escaped_ && has_unknown_taker_;
  has_unknown_taker_ = had_unknown_taker || taker == Taker::kUnknown;
  escaped_ = true;
  bool can_leave = leaves_addresses() && sentinel_.has_content();
  if (!can_leave && taker != Taker::kTensor) {
    bool ends = taker == Taker::kUnknown && used_elsewhere(*storage, 0);
    if (!ends) for_good_ = true;
  }
  hash_.reset();
  if (pins_ == 0) {
    pin_ = std::move(pin);
    attach(storage);
    pin_ = {};
  } else if (taker == Taker::kTouch) {
    residency_.renew(pin_);
    attach(storage);
    if (change_.empty()) change_ = std::move(pin);
  }
  return {};
}

Leave Unit::leaving(Block& block) {
  if (in_forked_child()) return Leave::kKeep;
  DeferBurials defer;
  c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();
  if (!storage || of(storage.get()) != this) return Leave::kDrop;
  if (escaped_) {
    if (in_hand == this) return Leave::kKeep;
    // To count who uses the storage may need the GIL, and the thread that has
    // it may wait for this one.
    bool can_count = !HostTier::on_own_thread() && !serving;
    if (has_unknown_taker_ && !can_count) return Leave::kKeep;
    if (is_taken(*storage, 1)) return Leave::kKeep;
    if (sentinel_.has_content() && !sentinel_.take_away(block)) {
      return Leave::kKeep;
    }
    escaped_ = false;
    bool same = shard_ != nullptr && !is_edited(block.bytes);
    detach(storage.get());
    if (same) return Leave::kDrop;
    if (shard_ != nullptr) shard_->ranks.announce_change(split_.unit);
    return Leave::kChanged;
  }
  hash_.reset();
  if (storage->_mutable_data_ptr_no_checks().get() != sentinel_.address()) {
    detach(storage.get());
  }
  return Leave::kDrop;
}

Status Unit::release(c10::StorageImpl* storage) {
  return release_to(storage, &Unit::own_memory);
}

Status Unit::release_from_budget(c10::StorageImpl* storage) {
  return release_to(storage, &Unit::memory_outside);
}

Result<Pin> Unit::hold() {
  if (consumed_) return Pin();
  ZINF_TRY(settled());
  std::lock_guard lock(mutex_);
  return residency_.pin(state_, Use::kRead);
}

std::uint64_t Unit::absent_bytes() const {
  if (consumed_ || link_ != nullptr) return 0;
  return residency_.place(state_) == Place::kAbsent ? bytes_ : 0;
}

c10::DataPtr Unit::own_memory(const Pin& pin) {
  return plain_pointer(residency_.block(pin), device_);
}

c10::DataPtr Unit::memory_outside(const Pin& pin) {
  bool stays = link_ != nullptr || escaped_ || pins_ > 0;
  if (stays || sentinel_.has_content()) return own_memory(pin);
  try {
    c10::DataPtr memory = c10::GetDefaultCPUAllocator()->allocate(bytes_);
    std::memcpy(memory.get(), pin.bytes().data(), bytes_);
    return memory;
  } catch (const std::exception&) {  // there is no memory for a second one
    return own_memory(pin);
  }
}

Status Unit::release_to(c10::StorageImpl* storage,
                        c10::DataPtr (Unit::*memory)(const Pin& pin)) {
  if (consumed_) return {};
  if (in_forked_child()) {
    return Status::error(Code::kInvalid,
                         name() + " cannot be released in a forked child");
  }
  retain();
  Status status = settled();
  if (status.ok()) {
    std::lock_guard lock(mutex_);
    if (of(storage) == this) {
      Result<Pin> pin = residency_.pin(state_, Use::kRead);
      status = pin.status();
      if (status.ok()) {
        if (link_ != nullptr) status = link_->hand_out(pin->bytes().data());
        // An address that was told stays what it was; no budget counts it.
        if (status.ok() && shown_ && !sentinel_.has_content()) {
          status = move_to_own_addresses(*pin, Reservation());
        }
      }
      if (status.ok()) {
        if (auto watch = watch_.lock()) watch->before_end(*this, pin->bytes());
        sentinel_.clear();
        storage->clear_materializer();
        storage->set_data_ptr_noswap((this->*memory)(*pin));
      }
    }
  }
  drop_reference();
  return status;
}

void Unit::set_parameter_name(const std::string& parameter) {
  if (parameter == name_.parameter) return;
  name_.parameter = parameter;
  if (!consumed_) residency_.rename(state_, parameter);
}

void Unit::forget() {
  if (consumed_) return;
  if (shard_ != nullptr) {
    Ranks& ranks = shard_->ranks;
    if (link_ != nullptr) residency_.remove(state_);
    ranks.gather().close(split_);
    if (role_ == Role::kGrad) {
      ranks.drop_gradient(*shard_);
    } else {
      ranks.drop(*shard_);
    }
    return;
  }
  if (role_ == Role::kGrad) {
    Announcement announcement;
    announcement.add(*this, UseKind::kFree);
    announcement.make();
  }
  residency_.remove(state_);
}

void Unit::prefetch() {
  if (!manager_->options().tier.prefetch) return;
  if (!consumed_ && !stays_) residency_.prefetch(state_);
}

bool Unit::put_copy(std::span<const std::byte> content, Touch touch) {
  return sentinel_.put_copy(content, touch,
                            manager_->tier().memory().reserve_or_exceed(
                                Tag::kUnit, sentinel_.memory_bytes()));
}

// Nothing can be thrown where a pointer is used: it finds NaN.
bool Unit::serve_nothing(Touch touch, const std::string& why) {
  log(LogLevel::kError,
      "%s was used through a pointer and is all NaN there: %s", name().c_str(),
      why.c_str());
  std::vector<std::byte> nan(bytes_, std::byte{0xFF});
  return put_copy(nan, touch);
}

bool Unit::serve_fault(Touch touch) {
  auto refuse = [&](const std::string& why) {
    std::fprintf(stderr, "zinf: a pointer to %s was used: %s\n", name().c_str(),
                 why.c_str());
    return false;
  };
  if (!device_.is_cpu()) return refuse("it is on a device");
  if (in_forked_child()) return refuse("this is a forked child");
  Serving here;
  Status status = settled();
  std::lock_guard lock(mutex_);
  // Another thread was faster; or it was a write, where the system does not
  // tell, that now comes again.
  if (sentinel_.has_content()) return true;
  if (touch == Touch::kRead && sentinel_.has_copy()) return true;
  if (inside_operator() && !shown_) {
    ++manager_->violations;
    report_violation(name());
  }
  if (consumed_) {
    return serve_nothing(touch, "the update inside backward has used it");
  }
  if (status.ok()) {
    status = touch == Touch::kRead ? serve_read() : serve_write();
  }
  if (status.ok()) return true;
  // From here on everything raises: nothing is computed with that.
  manager_->fail(status.text());
  return serve_nothing(touch, status.text()) || refuse("there is no memory");
}

Status Unit::serve_read() {
  ZINF_ASSIGN(Pin pin, residency_.pin(state_, Use::kRead));
  if (put_copy(pin.bytes(), Touch::kRead)) return {};
  return Status::error(Code::kUnsupported, name() + ": there is no memory");
}

Status Unit::serve_write() {
  auto storage = storage_.lock();
  if (!has_own_addresses() || storage == nullptr || of(storage.get()) != this) {
    return Status::error(Code::kInvalid,
                         name() + " cannot be written through this address");
  }
  try {
    ZINF_TRY(let_out(storage.get(), Taker::kTouch));
  } catch (const std::exception& error) {  // what a watch has thrown
    return Status::error(Code::kInvalid, error.what());
  }
  arm(storage.get());
  return {};
}

}  // namespace zinf
