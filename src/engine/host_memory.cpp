#include "zinf/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/mutex.h"

namespace zinf {

struct HostMemory::Parts {
  Parts(Budget given_budget, Arena given_arena, SlabPool given_pool)
      : budget(std::move(given_budget)),
        arena(std::move(given_arena)),
        pool(std::move(given_pool)) {}

  Budget budget;
  Arena arena;
  SlabPool pool;
  const pid_t process = getpid();

  // Whether so many bytes, for which there was no room, fit now. REQUIRES that
  // the givers have given what they can.
  bool grow_for(std::uint64_t bytes, std::uint64_t used_before)
      ZINF_REQUIRES(mutex);

  Mutex mutex;  // held while a giver is asked: none goes meanwhile
  struct Source {
    Giver give;
    std::function<Status()> hindrance;
  };
  std::vector<std::shared_ptr<Source>> sources ZINF_GUARDED_BY(mutex);
  struct Measuring {
    std::uint64_t limit_bytes = 0;  // when it is over
    std::uint64_t most_bytes = 0;
  };
  std::optional<Measuring> measuring ZINF_GUARDED_BY(mutex);
};

Result<std::shared_ptr<HostMemory>> HostMemory::create(
    std::uint64_t limit_bytes) {
  std::uint64_t limit = limit_bytes == 0 ? kAddressSpaceBytes : limit_bytes;
  ZINF_ASSIGN(Budget budget, Budget::create("host_memory", limit));
  std::shared_ptr<HostMemory> memory(new HostMemory());
  ZINF_ASSIGN(
      Arena arena,
      Arena::create({.budget = &budget,
                     .tag = Tag::kTensor,
                     .on_pressure = [self = memory.get()](std::size_t bytes) {
                       return self->ask_givers(bytes) > 0;
                     }}));
  ZINF_ASSIGN(SlabPool pool,
              SlabPool::create({.budget = &budget, .tag = Tag::kUnit}));
  memory->parts_.reset(
      new Parts(std::move(budget), std::move(arena), std::move(pool)));
  return memory;
}

HostMemory::~HostMemory() = default;

void HostMemory::set_limit(std::uint64_t limit_bytes) {
  if (limit_bytes == 0) limit_bytes = kAddressSpaceBytes;
  MutexLock lock(parts_->mutex);
  if (parts_->measuring) {
    parts_->measuring->limit_bytes = limit_bytes;
  } else {
    parts_->budget.set_limit(limit_bytes);
  }
}

void HostMemory::start_measuring(std::uint64_t most_bytes) {
  make_room(kAddressSpaceBytes);
  trim();
  MutexLock lock(parts_->mutex);
  ZINF_CHECK(!parts_->measuring, "measuring twice");
  BudgetUsage now = parts_->budget.usage();
  parts_->measuring = {now.limit_bytes, most_bytes};
  parts_->budget.set_limit(std::max<std::uint64_t>(now.total.used_bytes, 1));
}

std::uint64_t HostMemory::stop_measuring() {
  MutexLock lock(parts_->mutex);
  if (!parts_->measuring) return 0;
  std::uint64_t least = parts_->budget.usage().limit_bytes;
  parts_->budget.set_limit(parts_->measuring->limit_bytes);
  parts_->measuring.reset();
  return least;
}

bool HostMemory::Parts::grow_for(std::uint64_t bytes,
                                 std::uint64_t used_before) {
  arena.trim();
  BudgetUsage now = budget.usage();
  std::uint64_t needed = now.total.used_bytes + align_up(bytes, kPage);
  if (needed <= now.limit_bytes) {
    if (now.total.used_bytes < used_before) return true;
    // It was refused all the same: memory comes in larger pieces.
    needed = now.limit_bytes + kHugePage;
  }
  if (needed > measuring->most_bytes) return false;
  budget.set_limit(needed);
  return true;
}

const Budget& HostMemory::budget() const { return parts_->budget; }
Arena& HostMemory::arena() { return parts_->arena; }

Allocate HostMemory::slabs() const {
  return [parts = parts_.get(), acquire = slab_memory(parts_->pool)](
             std::size_t bytes) -> Result<Block> {
    Result<Block> block = acquire(bytes);
    if (block.ok() || block.status().code() != Code::kOverBudget) return block;
    return parts->arena.trim() > 0 ? acquire(bytes) : std::move(block);
  };
}

std::shared_ptr<void> HostMemory::add_giver(Giver giver,
                                            std::function<Status()> hindrance) {
  auto added = std::make_shared<Parts::Source>(
      Parts::Source{std::move(giver), std::move(hindrance)});
  MutexLock lock(parts_->mutex);
  parts_->sources.push_back(added);
  auto remove = [self = shared_from_this(), added](void*) {
    MutexLock held(self->parts_->mutex);
    std::erase(self->parts_->sources, added);
  };
  return {added.get(), std::move(remove)};
}

Status HostMemory::hindrance() const {
  MutexLock lock(parts_->mutex);
  for (const auto& source : parts_->sources) {
    if (!source->hindrance) continue;
    if (Status status = source->hindrance(); !status.ok()) return status;
  }
  return {};
}

std::uint64_t HostMemory::make_room(std::uint64_t bytes) {
  std::uint64_t given = ask_givers(bytes);
  if (given >= bytes) return given;
  return given + parts_->arena.compact(bytes - given);
}

std::uint64_t HostMemory::ask_givers(std::uint64_t bytes) {
  if (getpid() != parts_->process) return 0;
  MutexLock lock(parts_->mutex);
  std::uint64_t used = parts_->budget.usage().total.used_bytes;
  std::uint64_t given = 0;
  for (auto source = parts_->sources.rbegin();
       source != parts_->sources.rend() && given < bytes; ++source) {
    given += (*source)->give(bytes - given);
  }
  parts_->pool.trim();  // what came back is kept, and counted, until then
  if (given < bytes) given += parts_->pool.tighten();
  if (given >= bytes || !parts_->measuring) return given;
  return parts_->grow_for(bytes, used) ? bytes : given;
}

void HostMemory::trim() {
  parts_->pool.trim();
  parts_->arena.trim();
}

std::uint64_t HostMemory::idle_bytes() const {
  return parts_->pool.stats().idle_bytes;
}

Result<Reservation> HostMemory::reserve(Tag tag, std::uint64_t bytes) {
  while (true) {
    Result<Reservation> reservation = parts_->budget.reserve(tag, bytes);
    if (reservation.ok() || reservation.status().code() != Code::kOverBudget) {
      return reservation;
    }
    if (parts_->arena.trim() == 0 && make_room(bytes) == 0) return reservation;
  }
}

Reservation HostMemory::reserve_or_exceed(Tag tag, std::uint64_t bytes) {
  return zinf::reserve_or_exceed(parts_->budget, tag, bytes, [&] {
    make_room(bytes);
    trim();
  });
}

}  // namespace zinf
