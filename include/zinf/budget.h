// A Budget is a limit in bytes, and who holds what of it.
//
// Every byte the engine takes is behind a Reservation with a Tag, so that a
// report can say who holds what. A request that does not fit is a Status
// (kOverBudget) with the whole picture in its text; nothing waits and nothing
// throws.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "zinf/status.h"

namespace zinf {

enum class Tag : std::uint8_t {
  kWeight,
  kMaster,
  kMoment,
  kGrad,
  kTensor,  // torch's: activations, batches, whatever is not a unit
  kStaging,
  kUnit,  // weights, gradients and optimizer states, which share one pool
  kOther,
};
inline constexpr std::size_t kNumTags = 8;

// "weight", "master", ...
std::string_view tag_name(Tag tag);

// No request and no limit can be larger: what a process can address (x86-64
// and arm64 with four levels of page tables).
inline constexpr std::uint64_t kAddressSpaceBytes = std::uint64_t{1} << 47;

struct TagUsage {
  std::uint64_t used_bytes = 0;
  std::uint64_t high_bytes = 0;  // the most since the last BudgetWatch
};

// A snapshot; while other threads reserve, its parts may be a moment apart.
struct BudgetUsage {
  std::uint64_t limit_bytes = 0;
  TagUsage total;
  std::array<TagUsage, kNumTags> by_tag;

  const TagUsage& of(Tag tag) const {
    return by_tag[static_cast<std::size_t>(tag)];
  }
};

class Reservation;

// Thread-safe and without locks: a child of fork() may go on using it (it has
// its own copy of the counts). Reservations may outlive their Budget.
class Budget {
 public:
  // kInvalid when the limit is 0 or more than kAddressSpaceBytes (which is the
  // limit for somebody who only wants to count). `name` is for texts: "host".
  static Result<Budget> create(std::string name, std::uint64_t limit_bytes);

  // kOverBudget when it does not fit, kInvalid when no budget could hold it.
  // Zero bytes are valid: a reservation to be grown later.
  Result<Reservation> reserve(Tag tag, std::uint64_t bytes) const;

  // What is held beyond a smaller limit stays; nothing more is given until it
  // is below. REQUIRES what create() asks of a limit.
  void set_limit(std::uint64_t limit_bytes) const;

  BudgetUsage usage() const;
  const std::string& name() const;

 private:
  friend class BudgetWatch;
  friend class Reservation;
  struct State;
  explicit Budget(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;
};

// Holds bytes of a Budget and gives them back when it is destroyed. Move-only;
// one thread at a time.
class Reservation {
 public:
  Reservation() = default;  // of no budget: holds 0 bytes and cannot grow
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation();
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  std::uint64_t bytes() const { return bytes_; }
  Tag tag() const { return tag_; }

  // On an error nothing has changed.
  Status grow(std::uint64_t bytes);

  // Takes the bytes even beyond the limit, for what cannot be refused; usage
  // then shows more than the limit.
  void grow_beyond_limit(std::uint64_t bytes);

  // At most what is held.
  void shrink(std::uint64_t bytes);

 private:
  friend class Budget;
  Reservation(std::shared_ptr<Budget::State> state, Tag tag)
      : state_(std::move(state)), tag_(tag) {}

  std::shared_ptr<Budget::State> state_;
  Tag tag_ = Tag::kOther;
  std::uint64_t bytes_ = 0;
};

// The most that was held since the watch was made. Thread-safe; it may outlive
// its Budget.
class BudgetWatch {
 public:
  explicit BudgetWatch(const Budget& budget);
  ~BudgetWatch();
  BudgetWatch(const BudgetWatch&) = delete;
  BudgetWatch& operator=(const BudgetWatch&) = delete;

  // What is held now, and the most of it.
  BudgetUsage usage() const;

 private:
  const std::shared_ptr<Budget::State> state_;
};

// Bytes of a budget for what cannot be refused: when there are too few, room is
// made, and if that is not enough the budget is exceeded.
Reservation reserve_or_exceed(const Budget& budget, Tag tag,
                              std::uint64_t bytes,
                              const std::function<void()>& make_room);

}  // namespace zinf
