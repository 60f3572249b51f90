// Commits and everything else that changes the list of versions.
//
// Note [Order of writes]: a version's blocks, its table and the catalog that
// names it are on the disk (synced) before the superblock that points to the
// catalog is written; that goes to the older of two slots and is synced before
// space of versions that it does not name is used again. So at every moment one
// slot is valid and everything it reaches is whole.
#include <algorithm>
#include <chrono>

#include "src/base/strf.h"
#include "src/tier/store_impl.h"
#include "zinf/log.h"

namespace zinf::tier {
namespace {

CatalogEntry catalog_entry(const Version& version) {
  return {version.info, version.blob};
}

bool is_kept(const Version& version) { return !version.info.names.empty(); }

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string StoreImpl::standing() const {
  MutexLock lock(mutex_);
  const Version* newest = newest_intact();
  return newest != nullptr ? "version " + newest->info.label() + " stands"
                           : "there is no version yet";
}

Status StoreImpl::begin_step() {
  MutexLock order(order_);
  ZINF_TRY(writable());
  return begin_step_ordered();
}

// See Note [Versions and space] in zinf/store.h.
Status StoreImpl::begin_step_ordered() {
  if (in_step_) return {};
  std::vector<Version> next;
  bool forgets = false;
  {
    MutexLock lock(mutex_);
    auto kept = static_cast<std::size_t>(
        std::count_if(versions_.begin(), versions_.end(), is_kept));
    // The commit that stays is the one that the working version came from,
    // else the newest.
    const Version* stays = nullptr;
    for (const Version& version : versions_) {
      if (!version.info.recent || !version.info.damage.ok()) continue;
      if (stays == nullptr || stays->info.id != base_) stays = &version;
    }
    bool room = options_.durability.every != 0 ||
                kept < shared_->volumes->header().kept;
    for (const Version& version : versions_) {
      Version copy = version;
      copy.info.recent = &version == stays && (room || is_kept(version));
      if (copy.info.recent || is_kept(copy)) {
        next.push_back(std::move(copy));
      } else {
        forgets = true;
      }
    }
  }
  if (forgets) {
    ZINF_TRY(
        persist(std::move(next), Sync::kMetadata).in("making room for a step"));
  } else {
    adopt(std::move(next));
  }
  in_step_ = true;
  return {};
}

Status StoreImpl::commit_ordered(std::uint64_t step) {
  ZINF_TRY(settle());
  ZINF_TRY(shared_->volumes->check_files(superblock_.capacity));
  ZINF_ASSIGN(Version version, write_table(step));
  std::vector<Version> next;
  {
    MutexLock lock(mutex_);
    next = versions_;
  }
  // Two commits stay: this one and the newest before it.
  Version* last = nullptr;
  for (Version& other : next) {
    if (!other.info.recent) continue;
    if (last != nullptr) last->info.recent = false;
    last = &other;
  }
  std::erase_if(next, [](const Version& other) {
    return !other.info.recent && !is_kept(other);
  });
  next.push_back(std::move(version));
  return persist(std::move(next), Sync::kEverything);
}

Status StoreImpl::commit(std::uint64_t step) {
  auto begin = std::chrono::steady_clock::now();
  MutexLock order(order_);
  ZINF_TRY(writable());
  Status status = commit_ordered(step);
  if (!status.ok()) {
    return status.in(strf("the commit of step %llu failed and %s",
                          static_cast<unsigned long long>(step),
                          standing().c_str()));
  }
  in_step_ = false;
  {
    MutexLock lock(mutex_);
    base_ = versions_.back().info.id;
    base_label_ = versions_.back().info.label();
  }
  std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
  ++shared_->counters.commits;
  shared_->counters.commit_ns += static_cast<std::uint64_t>(took.count());
  return {};
}

TableRecord StoreImpl::record_of(const Table& table) const {
  TableRecord record;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const Entry& entry = table[i];
    if (!entry.defined) continue;
    StateRecord state{.spec = states_[i].spec,
                      .present = entry.present,
                      .summed = entry.sums != nullptr,
                      .pieces = {},
                      .checksums = {}};
    if (entry.present) {
      state.spec.bytes = entry.bytes;
      state.pieces = entry.place.get()->pieces;
      if (entry.sums != nullptr) state.checksums = *entry.sums;
    }
    record.states.push_back(std::move(state));
  }
  return record;
}

// The working content as a version, its table written but not synced.
Result<Version> StoreImpl::write_table(std::uint64_t step) {
  Version version;
  version.info = {.id = next_version_++,
                  .step = step,
                  .created_ns = now_ns(),
                  .recent = true,
                  .names = {},
                  .damage = {}};
  TableRecord record;
  {
    MutexLock lock(mutex_);
    auto table = std::make_shared<Table>(working_);
    for (std::size_t i = 0; i < table->size(); ++i) {
      Entry& entry = (*table)[i];
      entry.defined = states_[i].defined;
      if (i != 0 && entry.present) ++version.info.num_states;  // 0: the extra
      version.info.bytes += entry.bytes;
    }
    record = record_of(*table);
    version.table = std::move(table);
  }
  record.version = version.info.id;
  record.step = step;
  std::vector<std::byte> blob = encode(record);
  ZINF_ASSIGN(auto pieces, shared_->allocator->take_metadata(blob.size()));
  version.blob = {pieces, blob.size(), checksum(blob)};
  version.blob_place =
      std::make_shared<Placement>(shared_->allocator, std::move(pieces));
  ZINF_TRY(shared_->volumes->write_blob(version.blob.pieces, blob));
  return version;
}

Status StoreImpl::sync(Sync what) {
  Status status = what == Sync::kEverything ? shared_->volumes->sync_all()
                                            : shared_->volumes->sync(0);
  if (status.ok()) {
    if (what == Sync::kEverything) unsynced_ = false;
    return {};
  }
  // The kernel reports a lost write once: what was put since the last sync may
  // be gone even if the next sync succeeds.
  MutexLock lock(mutex_);
  if (unsynced_ && working_error_.ok()) working_error_ = status;
  return status;
}

Status StoreImpl::write_superblock(const Superblock& superblock) {
  Page page;
  encode(superblock, page);
  ZINF_TRY(shared_->volumes->write_page(kSuperblocks + slot_ * kUnit, page));
  return sync(Sync::kMetadata);
}

Status StoreImpl::persist(std::vector<Version> next, Sync what) {
  std::vector<CatalogEntry> catalog;
  catalog.reserve(next.size());
  for (const Version& version : next) catalog.push_back(catalog_entry(version));
  std::vector<std::byte> blob = encode(catalog);
  ZINF_ASSIGN(auto pieces, shared_->allocator->take_metadata(blob.size()));
  auto place = std::make_shared<Placement>(shared_->allocator, pieces);
  if (pieces.size() > kMaxCatalogPieces) {
    return Status::error(Code::kNoSpace,
                         strf("the catalog would be in %zu pieces, %zu fit",
                              pieces.size(), kMaxCatalogPieces));
  }
  ZINF_TRY(shared_->volumes->write_blob(pieces, blob));
  ZINF_TRY(sync(what));

  Superblock superblock = superblock_;
  superblock.catalog = {pieces, blob.size(), checksum(blob)};
  ZINF_TRY(publish(std::move(superblock), {next, place}));
  catalog_ = std::move(place);
  adopt(std::move(next));
  return {};
}

Status StoreImpl::publish(Superblock next, Attempt attempt) {
  next.sequence = ++sequence_;
  next.next_version = next_version_;
  Status status = write_superblock(next);
  if (!status.ok()) {
    limbo_.push_back(std::move(attempt));
    return withdraw(status);
  }
  superblock_ = std::move(next);
  slot_ = 1 - slot_;
  limbo_.clear();
  return {};
}

// A superblock write failed, and nobody knows what the disk holds. Writes the
// old one over it, so that the failure is one also after a crash.
Status StoreImpl::withdraw(const Status& why) {
  Superblock old = superblock_;
  old.sequence = ++sequence_;
  Status status = write_superblock(old);
  if (status.ok()) {
    superblock_ = old;
    slot_ = 1 - slot_;
    limbo_.clear();
    return why;
  }
  return why.in(
      "the superblock could not be written, nor the old one over it: which of "
      "the two counts shows when the store is opened again");
}

void StoreImpl::adopt(std::vector<Version> next) {
  std::vector<Version> old;
  MutexLock lock(mutex_);
  old = std::exchange(versions_, std::move(next));
  free_indexes();
}

// The files have and keep the new sizes before a superblock says so: see Note
// [Order of writes].
Status StoreImpl::reserve(std::uint64_t state_bytes, std::uint64_t num_states) {
  MutexLock order(order_);
  ZINF_TRY(writable());
  Superblock superblock = superblock_;
  Capacity& capacity = superblock.capacity;
  if (state_bytes <= capacity.state_bytes &&
      num_states <= capacity.num_states) {
    return {};
  }
  ZINF_TRY(shared_->volumes->check_files(capacity));
  ZINF_ASSIGN(capacity,
              shared_->volumes->grown(capacity, state_bytes, num_states));
  Attempt attempt{.versions = {}, .catalog = catalog_};
  {
    MutexLock lock(mutex_);
    attempt.versions = versions_;
  }
  Status status = shared_->volumes->extend(capacity);
  if (status.ok()) status = sync(Sync::kEverything);
  if (status.ok()) status = publish(superblock, std::move(attempt));
  if (!status.ok()) {
    // Unless a superblock that may count needs them, the old sizes do.
    if (limbo_.empty()) shared_->volumes->cut(superblock_.capacity);
    return status.in("making room for more states");
  }
  shared_->allocator->grow(capacity);
  MutexLock lock(mutex_);
  capacity_ = capacity;
  return {};
}

Status StoreImpl::keep(const std::string& name) {
  MutexLock order(order_);
  ZINF_TRY(writable());
  if (name.empty() || name.size() > kMaxName) {
    return Status::error(Code::kInvalid,
                         "a version's name has 1 to 4096 bytes");
  }
  std::vector<Version> next;
  {
    MutexLock lock(mutex_);
    next = versions_;
  }
  Version* newest = nullptr;
  std::size_t kept = 0;
  for (Version& version : next) {
    const auto& names = version.info.names;
    if (std::find(names.begin(), names.end(), name) != names.end()) {
      return Status::error(Code::kInvalid, "there is a version " + name +
                                               " already: drop it first");
    }
    kept += is_kept(version) ? 1 : 0;
    if (version.info.damage.ok()) newest = &version;
  }
  if (newest == nullptr) {
    return Status::error(Code::kNotFound,
                         "keep " + name + ": nothing was committed");
  }
  std::uint32_t most = shared_->volumes->header().kept;
  if (!is_kept(*newest) && kept >= most) {
    return Status::error(
        Code::kNoSpace,
        strf("keep %s: %zu versions are kept already, the store was made for "
             "%u; drop one first",
             name.c_str(), kept, most));
  }
  newest->info.names.push_back(name);
  return persist(std::move(next), Sync::kMetadata).in("keep " + name);
}

Status StoreImpl::drop(const std::string& name) {
  MutexLock order(order_);
  ZINF_TRY(writable());
  std::vector<Version> next;
  {
    MutexLock lock(mutex_);
    next = versions_;
  }
  std::size_t dropped = 0;
  for (Version& version : next) dropped += std::erase(version.info.names, name);
  if (dropped == 0) {
    return Status::error(Code::kNotFound, "there is no version " + name);
  }
  std::erase_if(next, [](const Version& version) {
    return !version.info.recent && !is_kept(version);
  });
  return persist(std::move(next), Sync::kMetadata).in("drop " + name);
}

}  // namespace zinf::tier
