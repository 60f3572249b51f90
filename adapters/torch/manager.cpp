#include "adapters/torch/manager.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "adapters/torch/audit.h"
#include "adapters/torch/error.h"
#include "adapters/torch/keys.h"
#include "adapters/torch/later_update.h"
#include "adapters/torch/ranks.h"
#include "adapters/torch/update_queue.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/log.h"
#include "zinf/machine.h"

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
Leave ask(StateRef, void* unit, Block& block) {
  if (unit == nullptr) return Leave::kDrop;
  return static_cast<Unit*>(unit)->leaving(block);
}

Status not_closed(const Status& why) {
  const char* way_out =
      why.code() == Code::kOverBudget
          ? "Call engine.save() and then close with discard; or make room and "
            "close again: delete what is not needed any more, such as the "
            "optimizer with its states, or move a model off its device "
            "(model.cpu())"
          : "Bring a good state back with engine.load() and close again, or "
            "close with discard";
  return Status::error(why.code(),
                       "the engine is still open, and nothing was given up: " +
                           why.text() + ". " + way_out);
}

// Engines that are not closed.
struct Live {
  std::mutex mutex;
  std::vector<std::weak_ptr<Manager>> managers;
};

Live& live_managers() {
  static auto* live = new Live();
  return *live;
}

}  // namespace

struct Manager::Audit {
  Audit() { start_audit(); }
  ~Audit() { stop_audit(); }
  Audit(const Audit&) = delete;
  Audit& operator=(const Audit&) = delete;
};

Status check_machine_has(std::uint64_t bytes) {
  constexpr std::uint64_t kLeave = 20;  // a part for everybody else
  if (bytes == 0) return {};
  std::uint64_t room = available_memory();
  room -= room / kLeave;
  if (bytes <= room) return {};
  return Status::error(
      Code::kOverBudget,
      strf("weights, gradients and optimizer states that are not in memory "
           "take %s, and the machine has %s left for them: %s are missing",
           format_bytes(bytes).c_str(), format_bytes(room).c_str(),
           format_bytes(bytes - room).c_str()));
}

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
  // What older ones had to keep for a thread that could let go of it.
  for (const auto& older : live()) older->reap();
  auto manager = std::make_shared<Manager>(options);
  manager->limit_.emplace(options.host_bytes);
  ZINF_ASSIGN(manager->tier_,
              HostTier::create(process_memory(), options.tier, &ask));
  manager->copies_giver_ =
      manager->tier().memory().add_giver(&Sentinel::drop_copies);
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
  if (options.audit) manager->audit_ = std::make_unique<Audit>();
  std::lock_guard lock(live_managers().mutex);
  std::erase_if(live_managers().managers,
                [](const auto& known) { return known.expired(); });
  live_managers().managers.push_back(manager);
  return manager;
}

std::vector<std::shared_ptr<Manager>> Manager::live() {
  std::lock_guard lock(live_managers().mutex);
  std::vector<std::shared_ptr<Manager>> managers;
  for (const auto& known : live_managers().managers) {
    auto manager = known.lock();
    if (manager != nullptr && !manager->closed_) managers.push_back(manager);
  }
  return managers;
}

Manager::Manager(const ManagerOptions& options) : options_(options) {}

Manager::~Manager() {
  // The threads behind it are the parent's: nothing can be ended here.
  if (in_forked_child()) {
    new std::unique_ptr<Ranks>(std::move(ranks_));
    new std::shared_ptr<HostTier>(std::move(tier_));
    (void)device_tier_.release();
    return;
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

// When not everything fits, the model is what is wanted.
void Manager::for_each_unit(
    const std::function<void(Unit& unit, c10::StorageImpl* storage)>& call) {
  for (Role role : {Role::kWeight, Role::kGrad, Role::kState}) {
    for (Unit* unit : units()) {
      auto storage = unit->role() == role ? unit->storage() : nullptr;
      if (storage != nullptr) call(*unit, storage.get());
      unit->drop_reference();
    }
  }
}

Status Manager::release_units(const std::function<bool(const Unit&)>& which,
                              Pinned& pinned) {
  // What a pool keeps for reuse is memory that the next unit may need.
  constexpr std::uint64_t kMostIdle = std::uint64_t{64} << 20;
  Status first;
  for_each_unit([&](Unit& unit, c10::StorageImpl* storage) {
    if (!which(unit)) return;
    Status status = check_machine_has(unit.absent_bytes());
    if (status.ok()) status = unit.release_from_budget(storage);
    if (first.ok()) first = status;
    pinned.erase(&unit);
    if (process_memory()->idle_bytes() > kMostIdle) process_memory()->trim();
  });
  return first;
}

Result<Manager::Pinned> Manager::hold_units() {
  constexpr std::uint64_t kLook = std::uint64_t{64} << 20;
  std::uint64_t wanted = 0;
  for_each_unit(
      [&](Unit& unit, c10::StorageImpl*) { wanted += unit.absent_bytes(); });
  ZINF_TRY(check_machine_has(wanted));
  Pinned pinned;
  Status status;
  std::uint64_t unseen = kLook;
  for_each_unit([&](Unit& unit, c10::StorageImpl*) {
    if (!status.ok()) return;
    std::uint64_t bytes = unit.absent_bytes();
    wanted -= std::min(wanted, bytes);
    unseen += bytes;
    // Other processes take memory meanwhile, other ranks among them.
    if (bytes > 0 && unseen >= kLook) {
      unseen = 0;
      status = check_machine_has(wanted + bytes);
      if (!status.ok()) return;
    }
    Result<Pin> pin = unit.hold();
    if (pin.ok()) {
      pinned.emplace(&unit, std::move(pin).value());
    } else if (pin.status().code() != Code::kNotFound) {  // it has content
      status = pin.status();
    }
  });
  if (!status.ok()) return status;
  return pinned;
}

Status Manager::tell_lost_units(const Status& why) {
  std::string first;
  std::size_t others = 0;
  for_each_unit([&](Unit& unit, c10::StorageImpl*) {
    if (unit.is_consumed()) return;
    if (first.empty()) {
      first = unit.name();
    } else {
      ++others;
    }
  });
  if (first.empty()) return {};
  std::string more =
      others > 0 ? strf(" and %zu more weights, gradients and optimizer states",
                        others)
                 : "";
  return Status::error(
      why.code(),
      first + more +
          " could not be given back when the engine was closed, and cannot be "
          "used any more: " +
          why.text());
}

Status Manager::close(Ending ending) {
  if (in_forked_child() || closed_) return {};
  // The budgets are for training.
  std::uint64_t host_limit = process_memory()->budget().usage().limit_bytes;
  std::uint64_t device_limit = has_device_ ? device_tier_->limit_bytes() : 0;
  if (ending != Ending::kDiscard) {
    process_memory()->set_limit(0);
    if (has_device_) device_tier_->set_limit(kAddressSpaceBytes);
    try {
      settle();
    } catch (const std::exception&) {
      // The unit that waits for the update tells.
    }
  }
  Pinned pinned;
  if (ending == Ending::kKeepAll) {
    Result<Pinned> held = hold_units();
    if (!held.ok()) {
      process_memory()->set_limit(host_limit);
      if (has_device_) device_tier_->set_limit(device_limit);
      return not_closed(held.status());
    }
    pinned = std::move(held).value();
  }
  tier_->rest();
  bool discards = ending == Ending::kDiscard;
  Status kept;
  if (ranks_ != nullptr) {
    if (!discards) {
      kept = release_units(
          [](const Unit& unit) { return unit.shard() != nullptr; }, pinned);
    }
    (void)ranks_->finish();  // others may need slices until then
  }
  Status status;
  if (!discards) {
    status = release_units([](const Unit&) { return true; }, pinned);
  }
  pinned.clear();
  discarded_ = discards;
  closed_ = true;
  reap();
  Status lost;
  if (!discards) lost = tell_lost_units(kept.ok() ? status : kept);
  process_memory()->set_limit(host_limit);
  HostTierStats host = tier_->stats();
  ResidencyStats device;
  if (device_tier_) device = device_tier_->residency().stats();
  limit_.reset();
  audit_.reset();
  std::lock_guard lock(mutex_);
  last_.tier = host;
  last_.device = device;
  if (num_units_ > 0) return lost;  // what is lost, or in use
  device_tier_.reset();
  ranks_.reset();
  tier_.reset();
  return lost;
}

void Manager::wait_for_updates() {
  if (!in_forked_child()) UpdateQueue::instance().wait();
}

void Manager::count_step() {
  if (closed_) return;
  reap();
  install_fault_handler();
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
        unit.name() +
            (discarded_
                 ? " was discarded when its engine was closed"
                 : " did not fit in memory when its engine was closed: call "
                   "engine.save() before close(), or on a device "
                   "model.cpu()")));
  }
}

std::uint64_t Manager::resident_bytes() const {
  std::lock_guard lock(mutex_);
  return tier_ == nullptr ? 0 : tier_->residency().stats().memory_bytes;
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
