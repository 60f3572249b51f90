// Opening: from the superblocks to the working table; and going back to a
// version.
#include <algorithm>
#include <array>

#include "src/base/strf.h"
#include "src/tier/store_impl.h"
#include "zinf/log.h"

namespace zinf::tier {

namespace {

// Index 0: the opaque piece of every version. Its size is free.
StateSpec extra_spec() {
  return {.unit = "", .state = "extra", .dtype = "bytes", .shape = {}};
}

}  // namespace

Geometry StoreImpl::geometry() const {
  return {superblock_.uuid, shared_->block_bytes(),
          superblock_.capacity.volume_bytes};
}

Status StoreImpl::recover() {
  MutexLock order(order_);
  struct Found {
    std::size_t slot;
    Superblock superblock;
  };
  std::vector<Found> found;
  std::string problems;
  bool written = false;
  for (std::size_t slot = 0; slot < 2; ++slot) {
    Page page;
    std::uint64_t offset = kSuperblocks + slot * kUnit;
    Status read = shared_->volumes->read_page(offset, page);
    // A torn slot is what a crash leaves; one that cannot be read may be the
    // newest, and the older would silently lose a version.
    if (!read.ok() && !options_.fall_back) return read.in("superblock");
    Result<Superblock> parsed =
        read.ok() ? parse_superblock(page, shared_->volumes->header())
                  : Result<Superblock>(read);
    if (parsed.ok()) {
      found.push_back({slot, std::move(parsed).value()});
    } else {
      problems += strf("%sslot %zu: %s", problems.empty() ? "" : "; ", slot,
                       parsed.status().text().c_str());
      // A slot that was never written is zero.
      written |= !read.ok() || page != Page{};
    }
  }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return a.superblock.sequence > b.superblock.sequence;
  });
  std::string file = shared_->volumes->file(0);
  if (found.empty()) {
    return Status::error(Code::kCorrupt,
                         file + " has no valid superblock: " + problems);
  }
  Status status = recover_from(found[0].superblock);
  std::size_t used = 0;
  if (!status.ok() && options_.fall_back && found.size() > 1) {
    log(LogLevel::kWarning,
        "store: %s: falling back to the older superblock: %s", file.c_str(),
        status.text().c_str());
    used = 1;
    problems = status.text();
    written = true;
    status = recover_from(found[1].superblock);
  }
  ZINF_TRY(status.in(file));
  sequence_ = found[0].superblock.sequence;
  slot_ = 1 - found[used].slot;
  found_.clear();

  Status sizes = shared_->volumes->check_sizes(superblock_.capacity);
  MutexLock lock(mutex_);
  damage_ = sizes;
  if (written) {
    damage_ = Status::error(
        Code::kCorrupt,
        strf("%s: a superblock is damaged (%s): what was committed or named "
             "with it last is not known",
             file.c_str(), problems.c_str()));
  }
  const Version* newest = versions_.empty() ? nullptr : &versions_.back();
  if (newest != nullptr && newest->table == nullptr) {
    bool tolerated = options_.fall_back || options_.access != Access::kWrite;
    if (!tolerated) {
      return newest->info.damage.in("version " + newest->info.label());
    }
    newest = newest_intact();
    log(LogLevel::kWarning, "store: version %s is damaged (%s), taking %s",
        versions_.back().info.label().c_str(),
        versions_.back().info.damage.text().c_str(),
        newest != nullptr ? newest->info.label().c_str() : "none");
  }
  load_table(newest);
  free_indexes();
  return {};
}

// From nothing: another superblock may have been tried before.
void StoreImpl::reset(const Superblock& superblock) {
  superblock_ = superblock;
  catalog_.reset();
  found_.clear();
  shared_->allocator =
      std::make_shared<Allocator>(shared_->block_bytes(), superblock.capacity);
  shared_->allocator->set_weights(shared_->volumes->weights());
  MutexLock lock(mutex_);
  capacity_ = superblock.capacity;
  versions_.clear();
  working_.clear();
  states_.clear();
  index_.clear();
  removed_.clear();
  free_.clear();
  defined_bytes_ = 0;
  set_defined(new_index(extra_spec()));
}

Status StoreImpl::recover_from(const Superblock& superblock) {
  reset(superblock);
  Status sizes = shared_->volumes->check_sizes(superblock.capacity);
  if (options_.access == Access::kWrite) ZINF_TRY(sizes);
  if (!sizes.ok()) log(LogLevel::kWarning, "store: %s", sizes.text().c_str());
  next_version_ = std::max(next_version_, superblock.next_version);
  if (superblock.catalog.bytes == 0) return {};
  ZINF_ASSIGN(auto blob,
              shared_->volumes->read_blob(superblock.catalog, "the catalog"));
  Result<std::vector<CatalogEntry>> catalog = parse_catalog(blob, geometry());
  if (!catalog.ok()) return catalog.status().in("the catalog");
  ZINF_TRY(shared_->allocator->take_at(superblock.catalog.pieces));
  catalog_ = std::make_shared<Placement>(shared_->allocator,
                                         superblock.catalog.pieces);
  for (const CatalogEntry& entry : *catalog) {
    next_version_ = std::max(next_version_, entry.info.id + 1);
    ZINF_TRY(recover_version(entry));
  }
  return {};
}

Result<std::shared_ptr<const Table>> StoreImpl::read_table(
    const CatalogEntry& entry) {
  std::string what = "the table of version " + entry.info.label();
  ZINF_ASSIGN(auto blob, shared_->volumes->read_blob(entry.table, what));
  ZINF_ASSIGN(TableRecord record, parse_table(blob, geometry()));
  if (record.version != entry.info.id) {
    return Status::error(Code::kCorrupt, what + " belongs to another version");
  }
  MutexLock lock(mutex_);
  return rebuild(record);
}

// A version whose table cannot be used stays in the list, damaged; its blocks
// are lost.
Status StoreImpl::recover_version(const CatalogEntry& entry) {
  Version version{.info = entry.info,
                  .table = nullptr,
                  .blob = entry.table,
                  .blob_place = nullptr};
  ZINF_TRY(shared_->allocator->take_at(entry.table.pieces));
  version.blob_place =
      std::make_shared<Placement>(shared_->allocator, entry.table.pieces);
  Result<std::shared_ptr<const Table>> table = read_table(entry);
  if (table.ok()) {
    version.table = std::move(table).value();
  } else {
    // Its space would be used again: not because of a read that failed today.
    bool tolerated = options_.fall_back || options_.access != Access::kWrite;
    if (table.status().code() != Code::kCorrupt && !tolerated) {
      return table.status();
    }
    version.info.damage = table.status();
    log(LogLevel::kWarning, "store: version %s is lost: %s",
        entry.info.label().c_str(), table.status().text().c_str());
  }
  MutexLock lock(mutex_);
  versions_.push_back(std::move(version));
  return {};
}

// The index of a state that some version has; load_table() defines it.
std::uint32_t StoreImpl::index_of(const StateSpec& spec) {
  if (spec.unit.empty() && spec.state == extra_spec().state) return 0;
  if (auto index = removed_index(spec)) return *index;
  std::uint32_t index = new_index(spec);
  removed_.emplace(Key{spec.unit, spec.state}, index);
  return index;
}

// Equal pieces in several tables are one placement.
Result<std::shared_ptr<const Table>> StoreImpl::rebuild(
    const TableRecord& record) {
  auto table = std::make_shared<Table>(states_.size());
  for (const StateRecord& state : record.states) {
    std::uint32_t index = index_of(state.spec);
    if (table->size() < states_.size()) table->resize(states_.size());
    (*table)[index].defined = true;
    if (!state.present) continue;
    Entry entry{.bytes = state.spec.bytes, .present = true, .defined = true};
    if (state.summed) {
      entry.sums = std::make_shared<Checksums>(state.checksums);
    }
    std::shared_ptr<const Placement> place;
    if (!state.pieces.empty()) place = found_[state.pieces.front()];
    if (place == nullptr || place->pieces != state.pieces) {
      ZINF_TRY(shared_->allocator->take_at(state.pieces));
      place = std::make_shared<Placement>(shared_->allocator, state.pieces);
      if (!state.pieces.empty()) found_[state.pieces.front()] = place;
    }
    entry.place = PlacementRef(std::move(place));
    (*table)[index] = std::move(entry);
  }
  return std::shared_ptr<const Table>(std::move(table));
}

const Version* StoreImpl::newest_intact() const {
  for (auto version = versions_.rbegin(); version != versions_.rend();
       ++version) {
    if (version->table != nullptr && version->info.damage.ok()) {
      return &*version;
    }
  }
  return nullptr;
}

Result<const Version*> StoreImpl::version_of(std::uint64_t id) const {
  for (const Version& version : versions_) {
    if (version.info.id == id) return &version;
  }
  return Status::error(Code::kNotFound,
                       strf("the store has no version %llu",
                            static_cast<unsigned long long>(id)));
}

void StoreImpl::load_table(const Version* version) {
  working_ = version != nullptr ? *version->table : Table();
  working_.resize(states_.size());
  for (std::uint32_t i = 0; i < working_.size(); ++i) {
    if (working_[i].defined && !states_[i].defined) set_defined(i);
  }
  base_ = version != nullptr ? version->info.id : 0;
  base_label_ = version != nullptr ? version->info.label() : "none";
  working_error_ = {};
  for (State& state : states_) state.error = {};
}

Status StoreImpl::rollback() {
  MutexLock order(order_);
  (void)settle();
  {
    MutexLock lock(mutex_);
    const Version* version = newest_intact();
    if (version != nullptr) ZINF_TRY(check_definitions(*version));
    load_table(version);
  }
  in_step_ = false;
  unsynced_ = false;
  return {};
}

Status StoreImpl::load(std::uint64_t id) {
  MutexLock order(order_);
  (void)settle();
  {
    MutexLock lock(mutex_);
    ZINF_ASSIGN(const Version* version, version_of(id));
    if (version->table == nullptr) {
      return version->info.damage.in("version " + version->info.label());
    }
    ZINF_TRY(check_definitions(*version));
    load_table(version);
  }
  in_step_ = false;
  unsynced_ = false;
  return {};
}

Result<std::vector<StateSpec>> StoreImpl::contents(std::uint64_t id) const {
  MutexLock lock(mutex_);
  ZINF_ASSIGN(const Version* version, version_of(id));
  if (version->table == nullptr) return version->info.damage;
  std::vector<StateSpec> specs;
  for (std::size_t i = 1; i < version->table->size(); ++i) {
    if ((*version->table)[i].present) specs.push_back(states_[i].spec);
  }
  return specs;
}

}  // namespace zinf::tier
