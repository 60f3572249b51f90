// Gradients between groups of ranks: Note [Groups] in ranks.h.
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/ranks.h"
#include "src/base/strf.h"
#include "zinf/collectives.h"

namespace zinf {

std::int64_t Ranks::sum_elements(const Shard& shard) const {
  const auto count = static_cast<std::int64_t>(shard.mine.size());
  const std::int64_t groups = num_groups();
  return (count + groups - 1) / groups * groups;
}

void Ranks::mark_all_due(bool due) {
  const auto all = shards();
  std::lock_guard lock(mutex_);
  for (const auto& shard : all) shard->is_due = due;
  changed_.notify_all();
}

// The ranks of this group hear of a failure by their exchange alone.
void Ranks::wait_between_groups(Move& move) {
  Status status = move.wait();
  if (!status.ok()) fail(status);
  throw_if_failed(status);
}

std::uint64_t Ranks::hash_of_units() {
  std::size_t hash = 0;
  for (const auto& shard : shards()) {
    const std::string text = shard->name + "/" +
                             std::to_string(shard->mine.begin) + "-" +
                             std::to_string(shard->mine.end) +
                             c10::toString(shard->weight.scalar_type());
    hash = hash * 31 + std::hash<std::string>()(text);
  }
  return hash;
}

// Where they differ the messages below would not fit together.
void Ranks::compare_groups() {
  struct Facts {
    std::uint64_t passes;
    std::uint64_t num_units;
    std::uint64_t units;
    std::uint64_t contents;
  };
  const std::vector<std::uint64_t> contents = gather_->exchange().contents();
  const Facts own = {number_, gather_->exchange().next_unit(), hash_of_units(),
                     hash_of(std::as_bytes(std::span(contents)))};
  std::vector<Facts> all(static_cast<std::size_t>(num_groups()));
  wait_between_groups(*all_gather(*same_slice_,
                                  std::as_bytes(std::span(&own, 1)),
                                  std::as_writable_bytes(std::span(all))));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const char* what = nullptr;
    if (all[i].units != own.units) what = "other parameters";
    if (all[i].num_units != own.num_units) what = "more or fewer parameters";
    if (all[i].passes != own.passes) what = "more or fewer backward passes";
    if (what == nullptr) continue;
    Status why = Status::error(
        Code::kInvalid,
        strf("rank %d has %s than rank %d: all ranks must build the same model "
             "and make the same passes",
             same_slice_->number(static_cast<int>(i)), what, rank()));
    fail(why);
    throw_if_error(why);
  }
  const bool same = std::ranges::all_of(
      all, [&](const Facts& each) { return each.contents == own.contents; });
  if (!same) compare_contents(contents);
}

// The number of units is the same in all groups.
void Ranks::compare_contents(const std::vector<std::uint64_t>& own) {
  std::vector<std::uint64_t> all(own.size() *
                                 static_cast<std::size_t>(num_groups()));
  wait_between_groups(*all_gather(*same_slice_, std::as_bytes(std::span(own)),
                                  std::as_writable_bytes(std::span(all))));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::size_t unit = i % own.size();
    if (all[i] == own[unit]) continue;
    auto shard = shard_of_unit(static_cast<std::uint32_t>(unit));
    const int other = same_slice_->number(static_cast<int>(i / own.size()));
    Status why = Status::error(
        Code::kInvalid,
        strf("rank %d and rank %d have changed \"%s\" outside of training to "
             "different values: all ranks must make the same changes",
             std::min(rank(), other), std::max(rank(), other),
             shard == nullptr ? "a parameter" : shard->name.c_str()));
    fail(why);
    throw_if_error(why);
  }
}

void Ranks::sum_groups(std::vector<std::uint32_t>& units) {
  c10::AutoGradMode no_grad(false);
  compare_groups();
  const std::size_t count = gather_->exchange().next_unit();
  std::vector<std::byte> own(count);
  for (std::uint32_t unit : units) own[unit] = std::byte{1};
  std::vector<std::byte> all(count * static_cast<std::size_t>(num_groups()));
  wait_between_groups(*all_gather(*same_slice_, own, all));
  units.clear();
  for (std::uint32_t unit = 0; unit < count; ++unit) {
    bool there = false;
    for (std::size_t i = unit; i < all.size(); i += count) {
      there |= all[i] != std::byte{0};
    }
    auto shard = there ? shard_of_unit(unit) : nullptr;
    if (shard == nullptr) continue;
    units.push_back(unit);
    if (shard->mine.size() == 0) continue;
    throw_if_failed(gather_->exchange().settled(unit, number_ + 1));
    sum_group(*shard);
    average_sum(*shard);
    if (update_) make_ready(shard);
  }
}

void Ranks::sum_group(Shard& shard) {
  at::Tensor sum = [&] {
    std::lock_guard lock(shard.mutex);
    return std::exchange(shard.sum, at::Tensor());
  }();
  if (!sum.defined()) {  // no rank of this group had a gradient
    sum = at::zeros({sum_elements(shard)}, at::kFloat);
  }
  std::span<float> all{sum.mutable_data_ptr<float>(),
                       static_cast<std::size_t>(sum.numel())};
  const std::size_t part = all.size() / static_cast<std::size_t>(num_groups());
  const std::span<float> own =
      all.subspan(part * static_cast<std::size_t>(same_slice_->rank()), part);
  wait_between_groups(*reduce_scatter(*same_slice_, all, own));
  wait_between_groups(*all_gather(*same_slice_, std::as_bytes(own),
                                  std::as_writable_bytes(all)));
  std::lock_guard lock(shard.mutex);
  shard.sum = sum;
}

}  // namespace zinf
