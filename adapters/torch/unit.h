// A unit: one torch storage under management.
//
// The storage keeps its size; its data pointer has the unit as context and
// leads to the unit's memory while that is there, to a sentinel otherwise. The
// unit lives as long as such pointers do: it holds no reference to the storage.
//
// Note [Raw pointers]: while an operator has a unit pinned, the storage is like
// any other. Otherwise it is armed: the first request for a mutable pointer
// (`.numpy()`, dlpack, compiled code) makes the unit escaped. On the CPU, if it
// can leave memory, its content is then at the unit's own addresses
// (sentinel.h), which no other unit has while the storage lives; operators use
// it there too. An escaped unit stays in memory while a tensor that took its
// address lives (hold_for(): Python's `.numpy()` and dlpack make such a tensor
// of their own). Of other requests the taker is not known: then the unit stays
// while others than the known tensors (parameters and the like) use the
// storage. Then it may leave, and every address that was taken of it holds
// good: a read of it faults and gets a copy, a write faults and makes the unit
// escaped again. (Only the system itself does not fault: a read(2) or write(2)
// there fails.)
//
// Python's data_ptr() is own_address(), which brings nothing.
//
// What never leaves memory and what is on a device have the address of their
// memory. A pointer that was taken from such a parameter itself, not from a
// tensor that shares its storage, gives no sign of its end: the unit stays
// where it is for good. So does the whole of ranks, whose edits all of them
// hear of, and a unit that an operator of another thread has pinned meanwhile,
// whose content cannot move.
//
// Note [Undeclared writes]: an operator outside aten may write through a
// mutable pointer to what its schema declares as read. While such an operator
// has a unit pinned, the storage is armed too: the first request for a mutable
// pointer hashes the content, and the last unpin hashes it again. A difference
// is a change like a declared one. The content of a device is not hashed but
// counts as changed, except with ranks: a change that other ranks do not make
// is an error, so both hashes are made of copies on the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adapters/torch/sentinel.h"
#include "zinf/gather_tier.h"
#include "zinf/host_tier.h"
#include "zinf/residency.h"
#include "zinf/trace.h"

namespace zinf {

class DeviceLink;
class LaterUpdate;
class Manager;
class Unit;
struct Shard;

// What a unit holds, and of which parameter.
struct UnitName {
  std::string parameter;         // "layers.0.weight"
  std::string state = "weight";  // "grad", "exp_avg", ...

  // For people: "layers.0.weight", "layers.0.weight/exp_avg".
  std::string text() const {
    return state == "weight" ? parameter : parameter + "/" + state;
  }
};

// Told before a weight may be changed by others than its optimizer. Called with
// the unit locked and its content in memory.
class EditWatch {
 public:
  virtual ~EditWatch() = default;
  virtual void before_edit(Unit& unit, std::span<std::byte> content) = 0;
  // Whether an edit that replaces everything needs the old content first.
  virtual bool wants_content() = 0;
  // Of the unit: nobody tells about edits from here on. Does not throw.
  virtual void before_end(Unit& unit, std::span<std::byte> content) = 0;
};

// The same for the same bytes, in this process.
std::uint64_t hash_of(std::span<const std::byte> bytes);

// Who uses a storage: tensors and other holders.
std::size_t uses_of(c10::StorageImpl& storage);

// Thread-safe.
class Unit final : public FaultServer {
 public:
  // The unit of a storage, or null. Cheap: no lookup.
  static Unit* of(c10::StorageImpl* storage);
  static Unit* of(const at::TensorBase& tensor);

  // Makes the tensor's storage a unit; with a shard, the whole of it.
  static void adopt(std::shared_ptr<Manager> manager,
                    const at::TensorBase& tensor, Role role, UnitName name,
                    std::shared_ptr<Shard> shard = nullptr);
  // One-dimensional, of so many elements, on the CPU; what it holds is to be
  // written first. It takes no memory before that. Of none: no unit.
  static at::Tensor without_content(std::shared_ptr<Manager> manager,
                                    std::int64_t elements, at::ScalarType dtype,
                                    UnitName name, Role role = Role::kWeight);
  // The whole gradient of a parameter that is split over ranks, above its
  // slices.
  static at::Tensor gradient(std::shared_ptr<Manager> manager,
                             const at::Tensor& parameter,
                             std::shared_ptr<Shard> shard);
  // An optimizer's state, float32 zeros in the layout of this tensor: it takes
  // no memory before it is used. On the CPU. REQUIRES a dense tensor.
  static at::Tensor zeros(std::shared_ptr<Manager> manager,
                          const at::Tensor& like, UnitName name);
  // A tensor like this one without content, in the place of a gradient that an
  // update inside backward has used: every use of it throws.
  static at::Tensor consumed(std::shared_ptr<Manager> manager,
                             const at::Tensor& like, UnitName name);
  ~Unit() override;

  // A tensor on the storage that has our keys and belongs to a parameter: its
  // use of the storage is expected.
  void know(const at::TensorBase& tensor);

  // Keeps the content in memory, with the storage pointing to it, until unpin.
  // Throws what a move of it has met. The caller holds the storage.
  void pin(c10::StorageImpl* storage, Use use);
  void unpin(c10::StorageImpl* storage);

  // Gives the content to the storage as ordinary memory and lets it go. On an
  // error it is managed as before.
  Status release(c10::StorageImpl* storage);
  // The same, in memory of torch's own, which no budget counts; a unit whose
  // address was told keeps it, and on a device the content stays where it is.
  Status release_from_budget(c10::StorageImpl* storage);
  // Keeps the content in memory where it is; nothing can be seen of that.
  Result<Pin> hold();
  // Of the host's memory, bytes that hold() would take.
  std::uint64_t absent_bytes() const;

  // Of one that is pinned for reading: see Note [Undeclared writes].
  void watch_pointer(c10::StorageImpl* storage);
  // A mutable pointer is asked for while watch_pointer() is in force.
  void note_pointer();
  // A mutable pointer is asked for outside an operator.
  void escape(c10::StorageImpl* storage);
  // As escape(), for this tensor alone, on the unit's storage: the content
  // stays in memory while the tensor lives, whatever else uses the storage.
  // Does nothing for a unit without addresses of its own, nor under
  // watch_pointer().
  void hold_for(const at::TensorBase& tensor);
  // Where the content is when somebody touches it; null for a unit that has the
  // address of its memory.
  void* own_address();
  // Before the content leaves memory; the tier is locked.
  Leave leaving(Block& block);

  // One at a time: the last one counts.
  void watch_edits(std::weak_ptr<EditWatch> watch);
  bool is_watched_by(const EditWatch* watch);
  bool is_watched();
  // Whether somebody may have its address. REQUIRES that the caller, who uses
  // the storage through `tensor`, has pinned it once.
  bool escaped(const at::TensorBase& tensor);

  // Its content waits for this update; `owns` for the weight of it.
  void put_off(const std::shared_ptr<LaterUpdate>& later, bool owns);
  // Does what was put off for it. Every use begins so, before locks are taken.
  void settle();
  // Whether somebody may have its address, or had it until a moment ago.
  bool seen_from_outside();

  // Of a whole: what was changed through an address is announced and kept.
  void note_edits();
  // Of a whole: its slices are new. Throws what gathering it has met.
  void outdate();

  // The content of one in the host's memory, for an update: the storage does
  // not lead to it meanwhile, so whoever looks at it by whatever way waits for
  // what was put off. REQUIRES an update that was put off for it, or that
  // nobody else looks.
  Result<Pin> pin_unseen(Use use);

  // Of one on a device: its content in the host's memory. The device has none
  // of it from now on; it comes back when it is used. kInvalid while it is.
  Result<Pin> pin_on_host(Use use);
  // The same for reading; the device keeps what it has. REQUIRES
  // host_can_read().
  Result<Pin> read_on_host();
  // Whether the host can have the content of one on a device: nobody changes it
  // there through an address, and it is no whole of ranks'.
  bool host_can_read();
  void send_to_host();      // starts that
  void return_to_device();  // starts, where there is room for everything

  void tell_end();  // to the watch, while the content is still there
  void forget();    // the last thing before the end
  void prefetch();

  std::string name() const { return name_.text(); }
  const UnitName& full_name() const { return name_; }
  // Whether it can leave memory and come back: the host's, or a device's.
  bool moves() const { return !stays_ && !consumed_ && device_.is_cpu(); }
  bool moves_on_device() const {
    return !stays_ && !consumed_ && !device_.is_cpu();
  }
  bool pinned() const { return pins_.load(std::memory_order_relaxed) > 0; }
  StateRef state() const { return state_; }
  void set_parameter_name(const std::string& parameter);
  Role role() const { return role_; }
  std::size_t bytes() const { return bytes_; }
  c10::Device device() const { return device_; }
  const std::shared_ptr<Manager>& manager() const { return manager_; }
  // Of the whole of a parameter, or of its gradient, that is split over ranks.
  const std::shared_ptr<Shard>& shard() const { return shard_; }
  c10::intrusive_ptr<c10::StorageImpl> storage() const {
    return storage_.lock();
  }
  // A parameter's, as opposed to a tensor that was only born in init().
  bool is_consumed() const { return consumed_; }
  bool is_parameter() const { return is_parameter_; }
  void set_parameter() { is_parameter_ = true; }

  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  // For who has no reference: false when the last one is gone, and the unit is
  // about to be buried.
  bool retain_if_alive();
  void drop_reference();

  bool serve_fault(Touch touch) override;

 private:
  // Who has an address: one of takers_, a thread that wrote through it, or
  // somebody who asked the storage for it.
  enum class Taker : std::uint8_t { kTensor, kTouch, kUnknown };

  bool serve_nothing(Touch touch, const std::string& why);
  Status serve_read();
  Status serve_write();
  bool put_copy(std::span<const std::byte> content, Touch touch);
  // Somebody may change the content through an address from here on.
  Status let_out(c10::StorageImpl* storage, Taker taker);
  Status move_to_own_addresses(Pin& pin, Reservation paid);
  // Bytes for that; the memory that the content leaves may pay for them.
  Result<Reservation> pay_for_move();
  // Whether an address of an escaped unit was taken that must stay good. The
  // caller has `ours` uses of the storage.
  bool is_taken(c10::StorageImpl& storage, std::size_t ours);
  bool has_takers();
  // Whether it may leave memory when an address of it is known.
  bool leaves_addresses() const {
    return has_own_addresses() && shard_ == nullptr;
  }
  // Whether its content can be at its own addresses.
  bool has_own_addresses() const { return device_.is_cpu() && !stays_; }
  Unit(std::shared_ptr<Manager> manager,
       const c10::intrusive_ptr<c10::StorageImpl>& storage, Role role,
       UnitName name, std::shared_ptr<Shard> shard = nullptr);
  // Adds it to its tier.
  void register_state();
  void register_whole(GatherTier::Content content);
  StateSpec spec() const;
  // A tensor of a storage that leads to this unit alone.
  at::Tensor tensor_of(const c10::intrusive_ptr<c10::StorageImpl>& storage,
                       at::IntArrayRef sizes, at::IntArrayRef strides,
                       at::ScalarType dtype);
  void take_content(c10::StorageImpl* storage);
  void check_usable() const;
  // Of a whole, whose content is about to be other ranks' too.
  void announce_change();
  void keep_change();
  void look_for_edits();
  bool is_edited(std::span<const std::byte> content) const;
  void note_escape(std::span<const std::byte> content);
  void outdate_on_device();

  c10::DataPtr pointer_to(void* data);
  void attach(c10::StorageImpl* storage);
  void arm(c10::StorageImpl* storage);
  void detach(c10::StorageImpl* storage);
  bool knows(const at::TensorBase& tensor);
  // Whether others than the known tensors, and `ours` here, use the storage.
  bool used_elsewhere(c10::StorageImpl& storage, std::size_t ours);
  Status settled();  // settle(), where nothing may be thrown
  // The pinned content as the storage's own memory.
  c10::DataPtr own_memory(const Pin& pin);
  c10::DataPtr memory_outside(const Pin& pin);
  Status release_to(c10::StorageImpl* storage,
                    c10::DataPtr (Unit::*memory)(const Pin& pin));
  void note_content();
  void check_content();
  void note_pointer_locked();
  void keep_undeclared(c10::StorageImpl* storage);
  Result<std::uint64_t> content_hash();
  void let_go(c10::StorageImpl* storage);
  void tell_watch(std::span<std::byte> content);

  const std::shared_ptr<Manager> manager_;
  const std::shared_ptr<Shard> shard_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const c10::Device device_;
  DeviceLink* const link_;  // null on the CPU
  const std::size_t bytes_;
  const Role role_;
  Residency& residency_;
  const bool stays_;  // its home is this memory
  UnitName name_;
  bool consumed_ = false;  // there is no state, and no content
  StateRef state_;
  GatherTier::Split split_;  // of a whole
  Sentinel sentinel_;
  std::atomic<int> references_ = 0;  // data pointers and pins
  std::atomic<bool> is_parameter_ = false;
  std::atomic<bool> shown_ = false;  // its own address was asked for

  std::mutex known_mutex_;  // nothing is locked under it
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> known_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> takers_;
  std::weak_ptr<LaterUpdate> later_;
  std::shared_ptr<LaterUpdate> own_later_;
  std::atomic<bool> has_later_ = false;

  // Below: the mutex, or for leaving(), which only happens while nobody has it
  // pinned, the tier's lock. It is held while content comes from a disk.
  std::mutex mutex_;
  std::atomic<int> pins_ = 0;
  Pin pin_;
  Pin change_;
  bool escaped_ = false;
  bool has_unknown_taker_ = false;     // while it is escaped
  bool for_good_ = false;              // see Note [Raw pointers]
  std::optional<std::uint64_t> hash_;  // of the content, when audited
  // Of the content before a mutable pointer to it was given to an operator.
  std::optional<std::uint64_t> pointer_hash_;
  // Of a whole: a change of it was announced, and is not kept yet; what it was
  // when somebody got its address.
  bool announced_ = false;
  std::uint64_t escaped_hash_ = 0;
  std::weak_ptr<EditWatch> watch_;
};

}  // namespace zinf
