#include "adapters/torch/ranks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/pins.h"
#include "zinf/collectives.h"

namespace zinf {
namespace {

// Of wholes: what may stay unused where weights are split, and what is gathered
// ahead.
constexpr std::uint64_t kAwayBytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kAheadBytes = std::uint64_t{64} << 20;

[[noreturn]] void refuse_to_split(const std::string& name,
                                  const std::string& why) {
  throw Error(Status::error(Code::kUnsupported,
                            name + " cannot be split over ranks: it " + why));
}

void check_parameter(const at::Tensor& parameter, const std::string& name) {
  if (!parameter.is_non_overlapping_and_dense() ||
      parameter.nbytes() != parameter.storage().nbytes()) {
    refuse_to_split(name, "shares its memory with other tensors");
  }
}

}  // namespace

static Status check_options(const RanksOptions& options, int ranks) {
  if (options.world && !std::has_single_bit(static_cast<unsigned>(ranks))) {
    return Status::error(Code::kInvalid,
                         "deterministic=\"world\" with " +
                             std::to_string(ranks) +
                             " ranks: their number must be a power of two");
  }
  const int each = options.partition_group;
  if (each < 0 || (each > 0 && ranks % each != 0)) {
    return Status::error(Code::kInvalid,
                         "partition_group is " + std::to_string(each) +
                             ", must divide the number of ranks, " +
                             std::to_string(ranks));
  }
  if (options.world && each > 0 && each != ranks) {
    return Status::error(Code::kInvalid,
                         "deterministic=\"world\" does not work with "
                         "partition_group: groups are summed one by one");
  }
  return {};
}

// Where they differ, ranks would wait for each other in vain.
static Status compare_options(const RanksOptions& options, Comm& comm) {
  constexpr std::array<const char*, 3> kNames = {"stage", "partition_group",
                                                 "deterministic"};
  using Values = std::array<int, kNames.size()>;
  const Values own = {options.stage, options.partition_group, options.world};
  std::vector<Values> all(static_cast<std::size_t>(comm.size()));
  ZINF_TRY(all_gather(comm, std::as_bytes(std::span(&own, 1)),
                      std::as_writable_bytes(std::span(all)))
               ->wait());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      if (all[rank][i] == all[0][i]) continue;
      return Status::error(
          Code::kInvalid,
          std::string(kNames[i]) + " is not the same on rank 0 and rank " +
              std::to_string(rank) + ": give all ranks the same");
    }
  }
  return {};
}

Ranks::Ranks(Manager& manager, std::shared_ptr<Comm> comm,
             const RanksOptions& options)
    : manager_(manager), comm_(std::move(comm)), world_(options.world) {
  const int each = options.partition_group;
  group_ = comm_;
  if (each == 0 || each == size()) return;
  std::vector<int> group;
  std::vector<int> same_slice;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank / each == comm_->rank() / each) group.push_back(rank);
    if (rank % each == comm_->rank() % each) same_slice.push_back(rank);
  }
  group_ = make_view(comm_, std::move(group));
  same_slice_ = make_view(comm_, std::move(same_slice));
}

Result<std::unique_ptr<Ranks>> Ranks::create(Manager& manager,
                                             std::shared_ptr<Comm> comm,
                                             const RanksOptions& options,
                                             AskLeave leaving) {
  ZINF_TRY(compare_options(options, *comm));
  ZINF_TRY(check_options(options, comm->size()));
  std::unique_ptr<Ranks> ranks(new Ranks(manager, std::move(comm), options));
  Ranks* self = ranks.get();
  const bool split = options.stage >= 3;
  ZINF_ASSIGN(
      ranks->gather_,
      GatherTier::create(
          manager.tier(), ranks->group_,
          {.leaving = std::move(leaving),
           .home = split ? Home::kAway : Home::kBelow,
           .away_bytes = options.evict_always ? 0 : kAwayBytes,
           .ahead_bytes = options.prefetch ? kAheadBytes : 0,
           .settle =
               [self](std::uint32_t unit, std::uint64_t passes) {
                 return self->settle(unit, passes);
               },
           .keep =
               [self](std::uint32_t unit, std::span<const std::byte> slice) {
                 return self->keep(unit, slice);
               },
           .dropped = [self](std::uint32_t unit) { self->forget(unit); },
           .add_part =
               [self](const PartName& part, std::span<const std::byte> bytes) {
                 return self->add_part(part, bytes);
               },
           .taken = [self](std::uint32_t unit,
                           std::uint64_t) { return self->take(unit); }}));
  return ranks;
}

// Its threads call back.
Ranks::~Ranks() { gather_.reset(); }

std::shared_ptr<Shard> Ranks::shard_of_unit(std::uint32_t unit) {
  std::lock_guard lock(mutex_);
  const auto found = shards_.find(unit);
  return found == shards_.end() ? nullptr : found->second;
}

std::shared_ptr<Shard> Ranks::add(const at::Tensor& parameter,
                                  const std::string& name) {
  check_parameter(parameter, name);
  const auto elements = static_cast<std::uint64_t>(parameter.numel());
  const auto each = static_cast<std::uint32_t>(parameter.element_size());
  auto shard = std::make_shared<Shard>(
      *this, name, parameter, Partition(elements, num_slices()).slice(slice()));
  shard->weight =
      Unit::without_content(manager_.shared_from_this(),
                            static_cast<std::int64_t>(shard->mine.size()),
                            parameter.scalar_type(), {name, "weight"});
  std::optional<StateRef> slice;
  if (Unit* unit = Unit::of(shard->weight)) slice = unit->state();
  shard->weight_unit = gather_->add({name, elements, each}, slice);
  shard->grad_unit = gather_->add({name + "/grad", elements, each});
  std::lock_guard lock(mutex_);
  shards_[shard->weight_unit] = shard;
  shards_[shard->grad_unit] = shard;
  return shard;
}

void Ranks::drop(const Shard& shard) {
  gather_->drop(shard.weight_unit);
  gather_->drop(shard.grad_unit);
}

void Ranks::forget(std::uint32_t unit) {
  std::shared_ptr<Shard> last;
  std::lock_guard lock(mutex_);
  if (auto node = shards_.extract(unit)) last = std::move(node.mapped());
}

void Ranks::announce_change(std::uint32_t unit) {
  gather_->exchange().announce_change(unit);
}

Status Ranks::keep(std::uint32_t unit, std::span<const std::byte> slice) {
  auto shard = shard_of_unit(unit);
  if (shard == nullptr) return {};  // it was dropped meanwhile
  at::Tensor tensor =
      unit == shard->weight_unit ? shard->weight : shard->grad_slice();
  if (!tensor.defined()) return {};
  try {
    Pins pins;
    pins.take(tensor, Use::kReplace);
    std::memcpy(tensor.data_ptr(), slice.data(), slice.size());
  } catch (const std::exception& error) {
    return Status::error(Code::kIo, error.what()).in(shard->name);
  }
  return {};
}

// Who wants what was there before the update need not wait for it. Also for an
// update that was put off: see later_update.h.
Status Ranks::settle(std::uint32_t unit, std::uint64_t passes) {
  constexpr auto kLook = std::chrono::milliseconds(100);
  auto shard = shard_of_unit(unit);
  if (shard == nullptr) return {};
  const bool is_weight = unit == shard->weight_unit;
  if (!is_weight && same_slice_ == nullptr) return {};
  {
    std::unique_lock lock(mutex_);
    // A gradient is its group's sum until the pass is over.
    while ((shard->is_due || !is_weight) && passes > number_ &&
           updater_.load() != std::this_thread::get_id()) {
      ZINF_TRY(gather_->exchange().status());
      changed_.wait_for(lock, kLook);
    }
  }
  if (!is_weight) return {};
  try {
    if (Unit* slice = Unit::of(shard->weight)) slice->settle();
  } catch (const std::exception& error) {
    return Status::error(Code::kInvalid, error.what()).in(shard->name);
  }
  return {};
}

void Ranks::flush() {
  look_for_edits();
  throw_if_failed(gather_->residency().flush());
}

std::vector<std::shared_ptr<Shard>> Ranks::shards() {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Shard>> all;
  for (const auto& [unit, shard] : shards_) {
    if (unit == shard->weight_unit) all.push_back(shard);
  }
  return all;
}

void Ranks::look_for_edits() {
  if (manager_.escapes == 0) return;
  for (const auto& shard : shards()) {
    at::Tensor parameter = shard->parameter();
    if (Unit* unit = Unit::of(parameter)) unit->note_edits();
  }
}

void Ranks::outdate(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    Unit::of(parameter)->outdate();
  }
}

double Ranks::sum(double value) {
  throw_if_failed(all_reduce(*comm_, {&value, 1})->wait());
  return value;
}

double Ranks::sum_over_slices(double value) {
  throw_if_failed(all_reduce(*group_, {&value, 1})->wait());
  return value;
}

void Ranks::broadcast(std::span<std::byte> content) {
  throw_if_failed(zinf::broadcast(*comm_, 0, content)->wait());
}

Status Ranks::finish() {
  Status status = gather_->exchange().status();
  if (status.ok()) status = gather_->finish();
  comm_->close(Status::error(Code::kCancelled, "this rank has ended"));
  return status;
}

void Ranks::fail(const Status& why) {
  gather_->exchange().fail(why);
  changed_.notify_all();
}

// What the exchange knows says more than that a transfer was given up.
void Ranks::throw_if_failed(const Status& status) {
  if (status.ok()) return;
  Status known = gather_->exchange().status();
  changed_.notify_all();
  throw_if_error(known.ok() ? status : known);
}

RanksStats Ranks::stats() {
  ResidencyStats wholes = gather_->residency().stats();
  return {.rank = rank(),
          .ranks = size(),
          .traffic = comm_->stats(),
          .between_groups = same_slice_ ? same_slice_->stats() : CommStats(),
          .passes = number_,
          .wholes_bytes = wholes.memory_bytes,
          .wholes_high_bytes = wholes.memory_high_bytes,
          .wait_seconds = static_cast<double>(wholes.read_wait_ns) * 1e-9};
}

}  // namespace zinf
