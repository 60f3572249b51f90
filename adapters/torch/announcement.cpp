#include "adapters/torch/announcement.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>

#include "adapters/torch/manager.h"
#include "adapters/torch/ranks.h"

namespace zinf {
namespace {

// Of the weight's slice; a gradient's comes and goes on other threads.
Unit* of_slice(const Unit& whole) {
  if (whole.role() != Role::kWeight) return nullptr;
  return Unit::of(whole.shard()->weight);
}

// An evaluation: nothing is recorded for a backward pass, and this is none.
bool evaluates() {
  return !at::GradMode::is_enabled() &&
         torch::autograd::get_current_graph_task_id() == -1;
}

}  // namespace

void Announcement::add(Unit& unit, Use use) {
  if (unit.pinned()) return;
  constexpr std::array<UseKind, 3> kKinds = {UseKind::kRead, UseKind::kChange,
                                             UseKind::kReplace};
  add(unit, kKinds[static_cast<std::size_t>(use)]);
}

void Announcement::add_on_device(Unit& unit, UseKind kind) {
  Manager* manager = unit.manager().get();
  if (device_ != nullptr && device_ != manager) make();
  device_ = manager;
  on_device_.push_back({.state = unit.state().index, .kind = kind});
  on_device_bytes_ += unit.bytes();
}

void Announcement::add(Unit& unit, UseKind kind) {
  if (unit.manager()->closed() || in_forked_child()) return;
  // A gradient's end says nothing of what stays on a device, and comes late.
  if (unit.moves_on_device() && kind != UseKind::kFree) {
    add_on_device(unit, kind);
  }
  if (!unit.moves()) return;
  HostTier* tier = &unit.manager()->tier();
  if (tier_ != nullptr && tier != tier_) make();
  tier_ = tier;
  if (unit.shard() == nullptr) {
    uses_.push_back({.state = unit.state().index, .kind = kind});
    return;
  }
  gather_ = &unit.shard()->ranks.gather();
  wholes_.push_back({.state = unit.state().index, .kind = kind});
  Unit* slice = of_slice(unit);
  if (slice == nullptr || !slice->moves()) return;
  uses_.push_back({.state = slice->state().index, .kind = UseKind::kRead});
}

// What serves other ranks comes when they ask: it is in no order.
void Announcement::make() {
  if (!HostTier::on_own_thread()) {
    if (!uses_.empty()) tier_->announce({uses_.data(), uses_.size()});
    if (!wholes_.empty()) gather_->announce({wholes_.data(), wholes_.size()});
    if (!on_device_.empty()) {
      device_->announce_on_device({on_device_.data(), on_device_.size()},
                                  on_device_bytes_, evaluates());
    }
  }
  uses_.clear();
  wholes_.clear();
  on_device_.clear();
  on_device_bytes_ = 0;
}

}  // namespace zinf
