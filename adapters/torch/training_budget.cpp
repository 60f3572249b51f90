#include "adapters/torch/training_budget.h"

#include <algorithm>
#include <array>

#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "src/base/align.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"

namespace zinf {
namespace {

// Bytes by role, of one parameter or of many, and how many tensors these are.
struct Sizes {
  std::array<std::uint64_t, 3> bytes = {};
  std::array<std::size_t, 3> counts = {};

  std::uint64_t& of(Role role) { return bytes[static_cast<std::size_t>(role)]; }
  std::uint64_t of(Role role) const {
    return bytes[static_cast<std::size_t>(role)];
  }
  void add(Role role, std::uint64_t more) {
    if (more == 0) return;
    of(role) += align_up(more, std::uint64_t{kPage});
    ++counts[static_cast<std::size_t>(role)];
  }
  std::size_t count(Role role) const {
    return counts[static_cast<std::size_t>(role)];
  }
  std::uint64_t total() const { return bytes[0] + bytes[1] + bytes[2]; }
};

constexpr std::array<Role, 3> kRoles = {Role::kWeight, Role::kState,
                                        Role::kGrad};

// What this rank keeps of it counts.
void add_states(Sizes& sizes, const at::Tensor& parameter, bool split) {
  auto elements = static_cast<std::uint64_t>(shard_of(parameter).numel());
  sizes.add(Role::kState, 4 * elements);
  sizes.add(Role::kState, 4 * elements);
  bool half = parameter.scalar_type() == at::kBFloat16 && split;
  if (parameter.element_size() < 4) {
    sizes.add(Role::kState, (half ? 2 : 4) * elements);
  }
}

Sizes sizes_of(const at::Tensor& parameter, bool split) {
  Sizes sizes;
  sizes.add(Role::kWeight, shard_of(parameter).nbytes());
  sizes.add(Role::kGrad, shard_of(parameter).nbytes());
  add_states(sizes, parameter, split);
  return sizes;
}

// What the engine has, and what the optimizer will add to it.
Sizes all_of(Manager& manager, const TrainingPlan& plan) {
  Sizes sizes;
  for (Unit* unit : manager.units()) {
    if (unit->device().is_cpu() && !unit->is_consumed() &&
        unit->shard() == nullptr) {
      sizes.add(unit->role(), unit->bytes());
    }
    unit->drop_reference();
  }
  for (const at::Tensor& parameter : plan.fresh) {
    if (parameter.is_cpu()) add_states(sizes, parameter, plan.split);
  }
  for (const at::Tensor& parameter : plan.parameters) {
    if (plan.waiting && parameter.is_cpu() && parameter.requires_grad() &&
        !parameter.grad().defined()) {
      sizes.add(Role::kGrad, shard_of(parameter).nbytes());
    }
  }
  return sizes;
}

struct Budgets {
  std::uint64_t limit = 0;         // of host memory
  std::uint64_t others = 0;        // of it, tensors that are no units
  std::uint64_t highest = 0;       // the most that those ever had
  std::uint64_t others_units = 0;  // of others, units of other engines
  Sizes all;                       // that units will have
  std::vector<Sizes> each;         // of the parameters
  std::uint64_t largest = 0;       // of these
};

Budgets budgets_of(Manager& manager, const TrainingPlan& plan) {
  Budgets budgets;
  manager.adopt_offered();  // gradients are units, as soon as they can be
  process_memory()->trim();
  BudgetUsage usage = process_memory()->budget().usage();
  HostTierStats stats = manager.tier().stats();
  std::uint64_t units = stats.residency.memory_bytes;
  budgets.limit = usage.limit_bytes;
  budgets.others =
      usage.total.used_bytes - std::min(usage.total.used_bytes, units);
  budgets.highest = std::max(budgets.others, stats.others_high_bytes);
  for (const auto& other : Manager::live()) {
    if (other.get() != &manager) {
      budgets.others_units += other->resident_bytes();
    }
  }
  budgets.all = all_of(manager, plan);
  for (const at::Tensor& parameter : plan.parameters) {
    if (!parameter.is_cpu()) continue;
    budgets.each.push_back(sizes_of(parameter, plan.split));
    budgets.largest = std::max(budgets.largest, budgets.each.back().total());
  }
  return budgets;
}

// How much of `bytes` must be outside of what memory has beside `stays`. Others
// may be on their way in or out while the largest parameter is updated.
std::uint64_t overflow(const Budgets& budgets, std::uint64_t bytes,
                       std::uint64_t stays) {
  std::uint64_t taken = std::min(budgets.limit, budgets.highest + stays);
  std::uint64_t room = budgets.limit - taken;
  if (bytes <= room) return 0;
  return std::min(bytes, bytes - room + budgets.largest);
}

// Whether what has this role never leaves memory.
bool stays(const HostTierOptions& tier, Role role) {
  return tier.nvme.empty() || tier.where(role) == Where::kHost;
}

// What stays in memory, and the rest of the update that needs most.
std::uint64_t least_memory(const Manager& manager, const Budgets& budgets,
                           bool waiting) {
  const HostTierOptions& tier = manager.options().tier;
  Sizes stay;
  for (Role role : kRoles) {
    if (!stays(tier, role) || (role == Role::kGrad && !waiting)) continue;
    stay.of(role) = budgets.all.of(role);
  }
  std::uint64_t most = 0;
  for (const Sizes& sizes : budgets.each) {
    std::uint64_t moving = 0;
    for (Role role : kRoles) moving += stay.of(role) == 0 ? sizes.of(role) : 0;
    most = std::max(most, moving);
  }
  return stay.total() + most;
}

std::string mib(std::uint64_t bytes) {
  return strf("%.1f MiB", static_cast<double>(bytes) / kMiB);
}

Status check_memory(const Manager& manager, const Budgets& budgets,
                    bool waiting) {
  std::uint64_t least = least_memory(manager, budgets, waiting);
  if (least + budgets.others <= budgets.limit) return {};
  std::string text = strf(
      "host_memory is %s, but training this model needs at least %s for "
      "one update",
      mib(budgets.limit).c_str(), mib(least).c_str());
  if (budgets.others > 0) {
    text += strf(" beside %s of other tensors", mib(budgets.others).c_str());
  }
  if (budgets.others_units > 0) {
    text += strf(
        ", of which %s are other engines': close those, or delete their models "
        "and optimizers",
        mib(budgets.others_units).c_str());
  }
  text += strf(": raise it to %s or more", mib(least + budgets.others).c_str());
  if (manager.options().tier.nvme.empty()) {
    std::uint64_t bytes = overflow(budgets, budgets.all.total(), 0);
    text += strf(
        ", or give nvme= with at least %s free so that states can leave memory",
        mib(bytes).c_str());
  }
  return Status::error(Code::kOverBudget, text);
}

Status reserve_space(Manager& manager, const Budgets& budgets) {
  const HostTierOptions& tier = manager.options().tier;
  if (tier.nvme.empty()) return {};
  std::uint64_t forced = 0;  // onto NVMe
  std::uint64_t free = 0;    // to be where there is room
  std::uint64_t stays = 0;
  std::size_t count = 0;  // of what may leave memory
  for (Role role : kRoles) {
    Where where = tier.where(role);
    bool away = where == Where::kNvme || manager.options().evict_always;
    (where == Where::kHost ? stays
     : away                ? forced
                           : free) += budgets.all.of(role);
    if (where != Where::kHost) count += budgets.all.count(role);
  }
  std::uint64_t over = overflow(budgets, free, stays);
  if (forced + over == 0) return {};
  Status status = manager.tier().reserve(forced + over, count);
  if (status.code() != Code::kNoSpace) return status;
  std::string why;
  if (over > 0) {
    why = strf("%s do not fit in host_memory, which is %s", mib(over).c_str(),
               mib(budgets.limit).c_str());
  }
  if (forced > 0) {
    why += strf("%s%s are to live there", why.empty() ? "" : ", ",
                mib(forced).c_str());
  }
  return Status::error(
      Code::kOverBudget,
      strf("training this model needs %s on NVMe (%s): %s",
           mib(forced + over).c_str(), why.c_str(), status.text().c_str()));
}

}  // namespace

UpdateBytes update_bytes(const at::Tensor& parameter, bool split) {
  const HostTierOptions& tier = manager_of(parameter)->options().tier;
  Sizes sizes = sizes_of(parameter, split);
  UpdateBytes bytes;
  bytes.weight_stays = stays(tier, Role::kWeight);
  if (!stays(tier, Role::kGrad)) {
    bytes.grad = align_up(sizes.of(Role::kGrad), std::uint64_t{kHugePage});
  }
  bytes.moving = bytes.grad;
  if (!bytes.weight_stays) bytes.moving += sizes.of(Role::kWeight);
  (stays(tier, Role::kState) ? bytes.new_states : bytes.moving) +=
      sizes.of(Role::kState);
  return bytes;
}

void check_first_update(const at::Tensor& parameter, bool split) {
  UpdateBytes bytes = update_bytes(parameter, split);
  manager_of(parameter)->adopt_offered();  // so that they can leave
  // A gradient of this pass alone is among the activations now; one that was
  // accumulated is a unit, and may have left.
  bool counted = Unit::of(parameter.grad()) == nullptr;
  auto room = process_memory()->reserve(
      Tag::kOther, bytes.moving - (counted ? bytes.grad : 0));
  throw_if_error(
      room.status().in("the update does not fit beside the activations"));
}

void check_device_memory(Manager& manager) {
  std::uint64_t limit = manager.options().device_bytes;
  if (limit == 0) return;
  std::uint64_t largest = 0;
  std::string name;
  for (Unit* unit : manager.units()) {
    if (!unit->device().is_cpu() && unit->bytes() > largest) {
      largest = unit->bytes();
      name = unit->name();
    }
    unit->drop_reference();
  }
  if (largest <= limit) return;
  throw_if_error(Status::error(
      Code::kOverBudget,
      strf("device_memory is %llu bytes, but %s alone takes %llu on the "
           "device: raise it above that",
           static_cast<unsigned long long>(limit), name.c_str(),
           static_cast<unsigned long long>(largest))));
}

void check_training(Manager& manager, const TrainingPlan& plan) {
  if (manager.closed()) return;
  check_device_memory(manager);
  manager.settle();  // gradients of updates that wait would count as well
  Budgets budgets = budgets_of(manager, plan);
  if (budgets.each.empty()) return;
  Status fits = check_memory(manager, budgets, plan.waiting);
  if (!fits.ok() && budgets.others_units > 0) {
    process_memory()->make_room(kAddressSpaceBytes);
    budgets = budgets_of(manager, plan);
    fits = check_memory(manager, budgets, plan.waiting);
  }
  throw_if_error(fits);
  throw_if_error(reserve_space(manager, budgets));
}

}  // namespace zinf
