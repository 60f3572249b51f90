// What the units of one engine share.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "adapters/torch/device_tier.h"
#include "adapters/torch/host_allocator.h"
#include "adapters/torch/unit.h"
#include "zinf/comm.h"
#include "zinf/host_tier.h"

namespace zinf {

struct ManagerOptions {
  HostTierOptions tier;
  // For all of the process's tensors and states; 0: by what the machine has.
  std::uint64_t host_bytes = 0;
  std::uint64_t device_bytes = 0;  // for units on a device; 0: no limit
  bool evict_always = false;       // every unit leaves memory after each use
  bool audit = false;  // look for accesses and writes that were missed
  int stage = 3;       // see RanksOptions
  bool world = false;
  int partition_group = 0;

  // Nothing is brought before it is needed, for comparison.
  bool on_demand() const { return !tier.prefetch && !evict_always; }
};

// What becomes of units when their engine is closed.
enum class Ending : std::uint8_t {
  kKeepAll,       // ordinary memory; without enough of it nothing is closed
  kKeepWhatFits,  // the same as far as memory goes; the others are lost
  kDiscard,       // all are lost
};

struct ManagerStats {
  HostTierStats tier;
  ResidencyStats device;
  std::uint64_t units = 0;
  std::uint64_t weights_bytes = 0;  // of all units that are weights
  std::uint64_t escapes = 0;
  std::uint64_t violations = 0;  // operators that met what was not in memory
  std::uint64_t undeclared_writes = 0;
  std::uint64_t updates_waiting = 0;
};

class LaterUpdate;
class Ranks;

// Thread-safe. Units own it with whoever made it: with the last of them it is
// closed.
class Manager : public std::enable_shared_from_this<Manager> {
 public:
  // With a group of several ranks, parameters are split over them.
  static Result<std::shared_ptr<Manager>> create(
      const ManagerOptions& options, std::shared_ptr<Comm> comm = nullptr);
  explicit Manager(const ManagerOptions& options);
  ~Manager();

  // Makes the tensor's storage a unit if nobody else uses it: false when it
  // was left as it is (and false for what can never be one).
  bool adopt(const at::TensorBase& tensor, Role role, const UnitName& name,
             std::size_t tensors = 1);
  // A parameter that is a unit becomes split over the ranks, where there are
  // several.
  void split(const at::Tensor& parameter, const std::string& name);
  Ranks* ranks() { return ranks_.get(); }  // null: nothing is split
  // The same, now or when others have let go of its storage: autograd of a
  // gradient, a loader of a weight.
  void offer(const at::TensorBase& tensor, Role role, const UnitName& name);
  void adopt_offered();

  // Every unit's storage gets its content as ordinary memory: what the machine
  // and the device have is the limit, not the budgets. On an error it is still
  // open, with all its content, or it is closed(), and the error tells what is
  // lost and raises when it is touched.
  Status close(Ending ending);
  // At the end of the process: no thread updates a weight any more.
  void wait_for_updates();
  bool closed() const { return closed_; }
  // All that are not closed.
  static std::vector<std::shared_ptr<Manager>> live();

  // An optimizer's step over some of its units has ended.
  void count_step();

  // For units: a new one; one that nobody refers to any more (removed now, or
  // by the next reap() where locks forbid it).
  void enlist(Unit* unit);
  void bury(Unit* unit);
  void reap();

  // Something that a thread of ours must not let go of: the next reap() on
  // another does.
  void leave(std::shared_ptr<void> something);

  // All units in use, with a reference to each that the caller must drop.
  std::vector<Unit*> units();

  // After an update inside backward that was not finished: nothing is used
  // until heal().
  void fail(std::string why);
  std::string heal();  // what there was, or nothing

  bool usable() const { return !closed_ && !failed_; }

  // Updates that were put off (later_update.h). Whether one that takes so many
  // bytes may wait:
  bool may_wait(std::uint64_t bytes) const;
  void list_later(const std::shared_ptr<LaterUpdate>& later);
  void note_later(int more) { num_later_ += more; }
  // Does all of them now; or, when memory may become too short for them.
  void settle();
  void settle_if_short();  // throws nothing: what fails waits, or has failed
  // Forgets them: other content takes the place of all that they would change.
  void abandon_updates();

  // Throws when managed memory cannot be used here.
  void check_usable(const Unit& unit) const;

  // The memory of a device's units, or of the CPU's.
  Residency& residency_of(c10::Device device);
  // Null for the CPU.
  DeviceLink* link_of(c10::Device device);
  Result<StateRef> add(const StateSpec& spec, Role role, c10::Device device,
                       Unit* unit);
  // On a device, above what the host gathers from ranks.
  Result<StateRef> add_whole(const StateSpec& spec, StateRef whole,
                             c10::Device device, Unit* unit);
  Home home_of(Role role, c10::Device device);
  // Whether all units of the device may be there at once.
  bool holds_all(c10::Device device);
  // Whether so many bytes of states may live there: where a budget was given
  // for the device, beside all weights, as many gradients, and other states.
  bool holds_states(c10::Device device, std::uint64_t bytes);
  bool has_device() const { return has_device_; }
  // Throws BudgetError when so many bytes of units can never be on the device
  // at once: before an operator over lists has changed the first of them.
  void check_fits(c10::Device device, std::uint64_t bytes) const;
  // See DeviceTier; the first waits for the device too.
  std::uint64_t give_way_on_device();
  void stay_below_on_device(std::uint64_t had_bytes);
  // Units on the device that are used at once: see DeviceTier.
  void announce_on_device(std::span<const StateUse> at_once,
                          std::uint64_t bytes, bool evaluates);
  // Bytes of the device's budget, or the CPU's, for memory that a tensor has
  // already. What can leave memory later may exceed the budget for a moment;
  // what stays is refused when it does not fit.
  Reservation count(const c10::DataPtr& memory, std::uint64_t bytes, bool stays,
                    const std::string& name);

  // Operators over lists of tensors take so many bytes of units at a time: a
  // part of the budgets for where they are; 0: one unit.
  std::size_t piece_bytes(c10::Device device) const;

  HostTier& tier() { return *tier_; }
  const ManagerOptions& options() const { return options_; }
  ManagerStats stats();
  std::uint64_t resident_bytes() const;  // of units in the host's memory

  std::atomic<std::uint64_t> escapes = 0;
  std::atomic<std::uint64_t> violations = 0;
  std::atomic<std::uint64_t> undeclared_writes = 0;

 private:
  DeviceTier& device_tier(c10::Device device);
  const ManagerOptions options_;
  bool has_limits() const;

  // While it exists accesses are audited.
  struct Audit;
  std::unique_ptr<Audit> audit_;
  std::optional<HostLimit> limit_;
  std::shared_ptr<HostTier> tier_;
  std::shared_ptr<void> copies_giver_;  // see Sentinel::drop_copies()
  std::unique_ptr<Ranks> ranks_;
  std::unique_ptr<DeviceTier> device_tier_;  // made when it is needed
  c10::Device device_ = at::kCPU;            // whose
  std::atomic<bool> has_device_ = false;
  ManagerStats last_;  // when it was closed
  std::atomic<bool> discarded_ = false;
  std::atomic<bool> closed_ = false;

  std::atomic<bool> failed_ = false;

  mutable std::mutex mutex_;
  std::string failure_;
  std::atomic<int> num_units_ = 0;  // not deleted yet
  std::unordered_set<Unit*> live_;
  std::vector<Unit*> dead_;
  std::vector<std::shared_ptr<void>> left_;
  struct Offer {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    Role role;
    UnitName name;
  };
  std::vector<Offer> offered_;
  // Calls it for every unit that a storage leads to, weights first.
  void for_each_unit(
      const std::function<void(Unit& unit, c10::StorageImpl* storage)>& call);
  using Pinned = std::unordered_map<const Unit*, Pin>;
  // The first error. What was pinned until then is not any more.
  Status release_units(const std::function<bool(const Unit&)>& which,
                       Pinned& pinned);
  // All units; or why they cannot all be in memory.
  Result<Pinned> hold_units();
  // Ok when there are none.
  Status tell_lost_units(const Status& why);
  std::vector<std::weak_ptr<LaterUpdate>> waiting_updates();
  std::vector<std::weak_ptr<LaterUpdate>> later_;  // some are over
  std::atomic<int> num_later_ = 0;                 // that wait
  std::atomic<std::uint64_t> largest_later_ = 0;   // in bytes
};

// kOverBudget when the machine has no room for so many bytes more.
Status check_machine_has(std::uint64_t bytes);

// True in a child of fork(), where managed memory must not be used.
bool in_forked_child();

// While one exists on this thread, units that die are kept for a later reap():
// their tier is locked.
class DeferBurials {
 public:
  DeferBurials();
  ~DeferBurials();
  DeferBurials(const DeferBurials&) = delete;
  DeferBurials& operator=(const DeferBurials&) = delete;
  static bool active();
};

}  // namespace zinf
