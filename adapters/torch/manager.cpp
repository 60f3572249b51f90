#include "adapters/torch/manager.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "adapters/torch/error.h"
#include "adapters/torch/keys.h"
#include "adapters/torch/later_update.h"
#include "adapters/torch/ranks.h"
#include "adapters/torch/update_queue.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/log.h"

namespace zinf {
namespace {

std::atomic<bool> forked = false;
thread_local int deferring = 0;

void watch_forks() {
  static const int once =
      pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)once;
}

// What can be a unit at all.
bool is_manageable(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.is_meta() ||
      tensor.layout() != at::kStrided ||
      tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python)) {
    return false;
  }
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  // Another materializer is a lazily cloned storage's.
  return storage->nbytes() > 0 && storage->data() != nullptr &&
         !storage->has_materializer();
}

// Where the device can tell.
void check_device_has(c10::Device device, std::uint64_t bytes) {
  std::uint64_t has = 0;
  try {
    has = at::accelerator::getMemoryInfo(device.index()).second;
  } catch (const std::exception&) {
    return;
  }
  if (bytes <= has || has == 0) return;
  refuse("device_memory is " + format_bytes(bytes) + ", but " + device.str() +
         " has " + format_bytes(has));
}

// A state without a unit is the host's part of one on a device.
Leave ask(StateRef, void* unit) {
  if (unit == nullptr) return Leave::kDrop;
  return static_cast<Unit*>(unit)->leaving();
}

}  // namespace

bool in_forked_child() { return forked.load(std::memory_order_relaxed); }

DeferBurials::DeferBurials() { ++deferring; }
DeferBurials::~DeferBurials() { --deferring; }
bool DeferBurials::active() { return deferring > 0; }

Result<std::shared_ptr<Manager>> Manager::create(const ManagerOptions& options,
                                                 std::shared_ptr<Comm> comm) {
  watch_forks();
  if (in_forked_child()) {
    return Status::error(
        Code::kUnsupported,
        "no engine can be made in a forked child of a process that has had "
        "one: use the spawn start method");
  }
  auto manager = std::make_shared<Manager>(options);
  ZINF_ASSIGN(HostLimit limit, HostLimit::create(options.host_bytes));
  manager->limit_.emplace(std::move(limit));
  ZINF_ASSIGN(manager->tier_,
              HostTier::create(process_memory(), options.tier, &ask));
  if (comm == nullptr && options.world) {
    comm = std::move(make_thread_group(1).front());
  }
  if (comm != nullptr && (comm->size() > 1 || options.world)) {
    ZINF_ASSIGN(manager->ranks_,
                Ranks::create(*manager, std::move(comm),
                              {.stage = options.stage,
                               .evict_always = options.evict_always,
                               .prefetch = options.tier.prefetch,
                               .world = options.world,
                               .partition_group = options.partition_group},
                              &ask));
  }
  return manager;
}

Manager::Manager(const ManagerOptions& options) : options_(options) {}

Manager::~Manager() {
  // The threads behind it are the parent's: nothing can be ended here.
  if (in_forked_child()) {
    new std::unique_ptr<Ranks>(std::move(ranks_));
    new std::shared_ptr<HostTier>(std::move(tier_));
    (void)device_tier_.release();
  }
}

void Manager::split(const at::Tensor& parameter, const std::string& name) {
  Unit* unit = ranks_ == nullptr ? nullptr : Unit::of(parameter);
  if (unit == nullptr || unit->shard() != nullptr) return;
  c10::impl::ExcludeDispatchKeyGuard not_born(kOuterKey);
  auto shard = ranks_->add(parameter, name);
  throw_if_error(unit->release(parameter.storage().unsafeGetStorageImpl()));
  Unit::adopt(shared_from_this(), parameter, Role::kWeight, {name},
              std::move(shard));
}

DeviceTier& Manager::device_tier(c10::Device device) {
  std::lock_guard lock(mutex_);
  if (device_tier_ == nullptr) {
    DeviceTierOptions options{.bytes = options_.device_bytes,
                              .away_bytes = options_.tier.away_bytes};
    if (ranks_ != nullptr) {
      options.wholes = &ranks_->residency();
      options.whole_home = options_.stage >= 3 ? Home::kAway : Home::kBelow;
    }
    check_device_has(device, options_.device_bytes);
    auto made = DeviceTier::create(*tier_, device, options, &ask);
    throw_if_error(made.status());
    device_tier_ = std::move(made).value();
    device_ = device;
    has_device_ = true;
  }
  if (device != device_) {
    throw Error(Status::error(
        Code::kUnsupported,
        "an engine manages one device: this one has " + device_.str() +
            " already, and a tensor is on " + device.str()));
  }
  return *device_tier_;
}

Residency& Manager::residency_of(c10::Device device) {
  return device.is_cpu() ? tier_->residency() : device_tier(device).residency();
}

DeviceLink* Manager::link_of(c10::Device device) {
  return device.is_cpu() ? nullptr : &device_tier(device).link();
}

Result<StateRef> Manager::add(const StateSpec& spec, Role role,
                              c10::Device device, Unit* unit) {
  if (device.is_cpu()) return tier_->add(spec, role, unit);
  return device_tier(device).add(spec, role, unit);
}

Result<StateRef> Manager::add_whole(const StateSpec& spec, StateRef whole,
                                    c10::Device device, Unit* unit) {
  return device_tier(device).add_whole(spec, whole, unit);
}

Home Manager::home_of(Role role, c10::Device device) {
  if (device.is_cpu()) return tier_->home_of(role);
  return device_tier(device).home_of(role);
}

bool Manager::holds_all(c10::Device device) {
  return !options_.evict_always && device_tier(device).holds_all();
}

bool Manager::holds_states(c10::Device device, std::uint64_t bytes) {
  if (options_.device_bytes == 0 || closed_ ||
      options_.tier.where(Role::kState) != Where::kAuto) {
    return false;
  }
  for (Unit* unit : units()) {
    if (unit->device() == device && unit->role() != Role::kGrad) {
      bool weight = unit->role() == Role::kWeight;
      bytes += (weight ? 2 : 1) * unit->bytes();
    }
    unit->drop_reference();
  }
  return bytes <= device_tier(device).limit_bytes();
}

void Manager::check_fits(c10::Device device, std::uint64_t bytes) const {
  if (device.is_cpu() || !has_device_) return;
  std::uint64_t limit = device_tier_->limit_bytes();
  if (bytes <= limit) return;
  throw_if_error(Status::error(
      Code::kOverBudget,
      strf("device_memory is %s, but an operator over lists of tensors uses %s "
           "at once: nothing was changed; raise it",
           format_bytes(limit).c_str(), format_bytes(bytes).c_str())));
}

std::uint64_t Manager::give_way_on_device() {
  std::uint64_t had = device_tier_->give_way();
  if (had > 0) at::accelerator::synchronizeDevice(device_.index());
  return had;
}

void Manager::stay_below_on_device(std::uint64_t had_bytes) {
  device_tier_->stay_below(had_bytes);
}

void Manager::announce_on_device(std::span<const StateUse> at_once,
                                 std::uint64_t bytes, bool evaluates) {
  // Made before its first unit. No lock: units announce while others hold it.
  device_tier_->announce(at_once, bytes, evaluates);
}

Reservation Manager::count(const c10::DataPtr& pointer, std::uint64_t bytes,
                           bool stays, const std::string& name) {
  c10::Device device = pointer.device();
  HostMemory& memory = tier_->memory();
  // The arena has paid for it.
  if (device.is_cpu() && memory.arena().owns(pointer.get())) return {};
  if (stays) {
    auto reservation = memory.reserve(Tag::kUnit, bytes);
    throw_if_error(reservation.status().in(
        name + " is to stay in host memory and does not fit"));
    return std::move(reservation).value();
  }
  if (device.is_cpu()) return memory.reserve_or_exceed(Tag::kUnit, bytes);
  return device_tier(device).count(Tag::kUnit, bytes);
}

bool Manager::adopt(const at::TensorBase& tensor, Role role,
                    const UnitName& name, std::size_t tensors) {
  if (in_forked_child()) {
    throw Error(Status::error(Code::kInvalid,
                              name.text() +
                                  " cannot be managed in a forked child: use "
                                  "the spawn start method"));
  }
  if (Unit* unit = Unit::of(tensor)) {
    add_keys(*tensor.unsafeGetTensorImpl());
    unit->know(tensor);
    return true;
  }
  if (!is_manageable(tensor) ||
      uses_of(*tensor.storage().unsafeGetStorageImpl()) > tensors) {
    return false;
  }
  add_keys(*tensor.unsafeGetTensorImpl());
  Unit::adopt(shared_from_this(), tensor, role, name);
  return true;
}

void Manager::offer(const at::TensorBase& tensor, Role role,
                    const UnitName& name) {
  // Where nothing ever moves, a gradient is an ordinary tensor.
  if (role == Role::kGrad && !has_limits()) return;
  adopt_offered();
  // The first gradients come while most activations are still there.
  if (role == Role::kGrad) tier_->note_others();
  std::lock_guard lock(mutex_);
  for (Offer& offer : offered_) {
    if (offer.tensor.lock() == tensor.getIntrusivePtr()) return;
  }
  offered_.push_back(
      {c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), role,
       name});
}

std::size_t Manager::piece_bytes(c10::Device device) const {
  constexpr std::uint64_t kMost = std::uint64_t{32} << 20;
  constexpr std::uint64_t kShare = 16;  // of the budget, for one piece
  if (options_.evict_always) return 0;
  std::uint64_t limit = tier_->memory().budget().usage().limit_bytes;
  if (!device.is_cpu() && has_device_) {
    limit = std::min(limit, device_tier_->limit_bytes());
  }
  return static_cast<std::size_t>(std::min(kMost, limit / kShare));
}

bool Manager::has_limits() const {
  return options_.host_bytes != 0 || !options_.tier.nvme.empty() ||
         options_.device_bytes != 0 || options_.evict_always || options_.audit;
}

void Manager::adopt_offered() {
  std::vector<Offer> offered;
  {
    std::lock_guard lock(mutex_);
    offered.swap(offered_);
  }
  while (!offered.empty()) {
    Offer offer = std::move(offered.back());
    offered.pop_back();
    auto impl = offer.tensor.lock();
    if (!impl || !is_manageable(at::TensorBase(impl))) continue;
    at::TensorBase tensor(impl);
    bool adopted = false;
    try {
      adopted = adopt(tensor, offer.role, offer.name);
    } catch (...) {
      std::lock_guard lock(mutex_);
      offered_.insert(offered_.end(), offered.begin(), offered.end());
      throw;
    }
    if (adopted) {
      if (offer.role == Role::kWeight) {
        split(at::Tensor(tensor), offer.name.parameter);
        Unit::of(tensor)->set_parameter();
      }
      continue;
    }
    std::lock_guard lock(mutex_);
    offered_.push_back(std::move(offer));
  }
}

void Manager::enlist(Unit* unit) {
  ++num_units_;
  std::lock_guard lock(mutex_);
  live_.insert(unit);
}

void Manager::bury(Unit* unit) {
  if (in_forked_child()) return;  // its memory ends with the child
  {
    std::lock_guard lock(mutex_);
    live_.erase(unit);
    dead_.push_back(unit);
  }
  // A unit may hold what a thread of ours must not let go of.
  if (!DeferBurials::active() && !HostTier::on_own_thread()) reap();
}

void Manager::leave(std::shared_ptr<void> something) {
  std::lock_guard lock(mutex_);
  left_.push_back(std::move(something));
}

void Manager::reap() {
  std::vector<std::shared_ptr<void>> left;
  std::vector<Unit*> dead;
  {
    std::lock_guard lock(mutex_);
    dead.swap(dead_);
    if (!HostTier::on_own_thread()) left.swap(left_);
  }
  // The last unit may hold the last reference to this manager.
  auto self = shared_from_this();
  for (Unit* unit : dead) {
    if (!closed_) unit->tell_end();
    unit->forget();
    delete unit;
    --num_units_;
  }
}

std::vector<Unit*> Manager::units() {
  std::lock_guard lock(mutex_);
  std::vector<Unit*> units;
  for (Unit* unit : live_) {
    if (unit->retain_if_alive()) units.push_back(unit);
  }
  return units;
}

// Weights first: when not everything fits, the model is what is wanted.
Status Manager::release_units(const std::function<bool(const Unit&)>& which) {
  Status first;
  for (Role role : {Role::kWeight, Role::kGrad, Role::kState}) {
    for (Unit* unit : units()) {
      if (unit->role() == role && which(*unit)) {
        auto storage = unit->storage();
        Status status = storage ? unit->release(storage.get()) : Status();
        if (first.ok()) first = status;
      }
      unit->drop_reference();
    }
  }
  return first;
}

// Of a host's memory that is less than the model no more was to be expected.
void Manager::tell_lost_weights(const Status& why) {
  std::string first;
  std::size_t others = 0;
  bool expected = why.code() == Code::kOverBudget;
  for (Unit* unit : units()) {
    if (unit->role() == Role::kWeight && unit->storage() != nullptr) {
      if (first.empty()) {
        first = unit->name();
      } else {
        ++others;
      }
      expected = expected && unit->device().is_cpu();
    }
    unit->drop_reference();
  }
  if (first.empty()) return;
  log(expected ? LogLevel::kInfo : LogLevel::kWarning,
      "%s%s could not be given back when the engine was closed, and cannot be "
      "used any more (engine.save() or model.cpu() before close() would have "
      "kept them): %s",
      first.c_str(),
      others > 0 ? strf(" and %zu more weights", others).c_str() : "",
      why.text().c_str());
}

void Manager::close() {
  if (in_forked_child() || closed_) return;
  try {
    settle();  // while there is most room for it
  } catch (const std::exception&) {
    // Whoever needs the weight is told.
  }
  tier_->rest();
  if (has_device_) device_tier_->lift_limit();
  Status kept;
  if (ranks_ != nullptr) {
    kept =
        release_units([](const Unit& unit) { return unit.shard() != nullptr; });
    (void)ranks_->finish();  // others may need slices until then
  }
  Status status = release_units([](const Unit&) { return true; });
  closed_ = true;
  reap();
  tell_lost_weights(kept.ok() ? status : kept);
  tier_->unlink_files();
  HostTierStats host = tier_->stats();
  ResidencyStats device;
  if (device_tier_) device = device_tier_->residency().stats();
  limit_.reset();
  std::lock_guard lock(mutex_);
  last_.tier = host;
  last_.device = device;
  if (num_units_ > 0) return;  // what does not fit, or is in use
  device_tier_.reset();
  ranks_.reset();
  tier_.reset();
}

void Manager::unlink_files() {
  if (!in_forked_child()) UpdateQueue::instance().wait();
  if (!in_forked_child() && tier_ != nullptr) tier_->unlink_files();
}

void Manager::count_step() {
  if (closed_) return;
  reap();
  tier_->count_step();
  if (has_device_) device_tier_->count_step();
}

void Manager::fail(std::string why) {
  std::lock_guard lock(mutex_);
  if (failed_.exchange(true)) return;
  failure_ = std::move(why);
}

std::string Manager::heal() {
  std::lock_guard lock(mutex_);
  failed_ = false;
  return std::exchange(failure_, {});
}

bool Manager::may_wait(std::uint64_t bytes) const {
  return usable() && tier_->may_wait(bytes);
}

void Manager::list_later(const std::shared_ptr<LaterUpdate>& later) {
  constexpr std::size_t kFew = 64;
  std::lock_guard lock(mutex_);
  if (later_.size() > 2 * static_cast<std::size_t>(num_later_) + kFew) {
    std::erase_if(later_, [](const auto& weak) {
      auto listed = weak.lock();
      return listed == nullptr || listed->over();
    });
  }
  largest_later_ = std::max(largest_later_.load(), later->bytes());
  later_.push_back(later);
}

std::vector<std::weak_ptr<LaterUpdate>> Manager::waiting_updates() {
  std::lock_guard lock(mutex_);
  return later_;
}

void Manager::settle() {
  for (const auto& weak : waiting_updates()) {
    if (auto later = weak.lock()) later->run();
  }
}

void Manager::abandon_updates() {
  for (const auto& weak : waiting_updates()) {
    if (auto later = weak.lock()) later->abandon();
  }
}

void Manager::settle_if_short() {
  if (num_later_ == 0 || closed_ || LaterUpdate::running_here()) return;
  if (!tier_->is_short_of(largest_later_)) return;
  try {
    settle();
  } catch (const std::exception& error) {
    log(LogLevel::kDebug, "updates wait on: %s", error.what());
  }
}

void Manager::check_usable(const Unit& unit) const {
  if (in_forked_child()) {
    throw Error(Status::error(
        Code::kInvalid,
        unit.name() + " is managed by zinf in the parent process and cannot be "
                      "used in a forked child: use the spawn start method, or "
                      "engine.release(model) before the fork"));
  }
  if (failed_) {
    std::lock_guard lock(mutex_);
    throw Error(Status::error(
        Code::kInvalid,
        unit.name() + " cannot be used: " + failure_ +
            ": bring a good state back with engine.load() first"));
  }
  if (closed_) {
    throw Error(Status::error(
        Code::kInvalid,
        unit.name() + " did not fit in memory when its engine was closed: "
                      "call engine.save() before close(), or on a device "
                      "model.cpu()"));
  }
}

ManagerStats Manager::stats() {
  if (!closed_) adopt_offered();
  reap();
  ManagerStats stats;
  stats.tier = closed_ ? last_.tier : tier_->stats();
  if (closed_) {
    stats.device = last_.device;
  } else if (device_tier_) {
    stats.device = device_tier_->residency().stats();
  }
  for (Unit* unit : units()) {
    ++stats.units;
    if (unit->role() == Role::kWeight) stats.weights_bytes += unit->bytes();
    unit->drop_reference();
  }
  stats.escapes = escapes;
  stats.violations = violations;
  stats.undeclared_writes = undeclared_writes;
  stats.updates_waiting = static_cast<std::uint64_t>(num_later_);
  return stats;
}

}  // namespace zinf
