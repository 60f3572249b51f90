// A unit: one torch storage under management.
//
// The storage keeps its size; its data pointer has the unit as context and
// leads to the unit's memory while that is there, to a sentinel otherwise. The
// unit lives as long as such pointers do: it holds no reference to the storage.
//
// Note [Raw pointers]: while an operator has a unit pinned, the storage is like
// any other. Otherwise it is armed: the first request for a mutable pointer
// (`.numpy()`, dlpack, compiled code) brings the content into memory and makes
// the unit escaped, and it stays in memory until as many tensors use the
// storage as when it was adopted. A pointer that was taken from the parameter
// itself, not from a tensor that shares its storage, gives no sign of its end:
// such a unit stays for good. Reads through const pointers fault and get a copy
// (sentinel.h).
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "adapters/torch/sentinel.h"
#include "zinf/host_tier.h"
#include "zinf/residency.h"

namespace zinf {

class Manager;

class Unit final : public FaultSource {
 public:
  // The unit of a storage, or null. Cheap: no lookup.
  static Unit* of(c10::StorageImpl* storage);
  static Unit* of(const at::TensorBase& tensor);

  // Makes the storage a unit. `tensors` is how many known tensors use it.
  static void adopt(std::shared_ptr<Manager> manager,
                    c10::intrusive_ptr<c10::StorageImpl> storage, Role role,
                    std::string name, std::size_t tensors);
  ~Unit() override;

  // Keeps the content in memory, with the storage pointing to it, until unpin.
  // Throws what a move of it has met. The caller holds the storage.
  void pin(c10::StorageImpl* storage, bool change);
  void unpin(c10::StorageImpl* storage);

  // Gives the content to the storage as ordinary memory and lets it go.
  void release(c10::StorageImpl* storage);

  // A mutable pointer is asked for outside an operator.
  void escape(c10::StorageImpl* storage);
  // Before the content leaves memory; the tier is locked.
  Leave leaving();

  void forget();  // the last thing before the end
  void prefetch();
  void evict();

  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  Role role() const { return role_; }
  std::size_t bytes() const { return bytes_; }
  const std::shared_ptr<Manager>& manager() const { return manager_; }
  c10::intrusive_ptr<c10::StorageImpl> storage() const {
    return storage_.lock();
  }
  // A parameter's, as opposed to a tensor that was only born in init().
  bool is_parameter() const { return is_parameter_; }
  void set_parameter() { is_parameter_ = true; }

  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void drop_reference();

  Status copy_content(std::byte* to, std::size_t bytes) override;

 private:
  Unit(std::shared_ptr<Manager> manager,
       const c10::intrusive_ptr<c10::StorageImpl>& storage, Role role,
       std::string name, std::size_t tensors);

  c10::DataPtr pointer_to(void* data);
  void attach(c10::StorageImpl* storage);
  void arm(c10::StorageImpl* storage);
  void detach(c10::StorageImpl* storage);
  bool used_elsewhere(c10::StorageImpl& storage, std::size_t ours) const;
  void note_content();
  bool content_was_changed() const;

  const std::shared_ptr<Manager> manager_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const c10::Device device_;
  const std::size_t bytes_;
  const Role role_;
  const std::size_t tensors_;
  Residency& residency_;
  std::string name_;
  StateRef state_;
  Sentinel sentinel_;
  std::atomic<int> references_ = 0;  // data pointers and pins
  std::atomic<bool> is_parameter_ = false;

  // The mutex, or for leaving(), which only happens while nobody has it pinned,
  // the tier's lock.
  std::mutex mutex_;
  int pins_ = 0;
  Pin pin_;
  Pin change_;
  bool escaped_ = false;
  bool for_good_ = false;              // see Note [Raw pointers]
  std::optional<std::uint64_t> hash_;  // of the content, when audited
};

}  // namespace zinf
