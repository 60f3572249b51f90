// The state behind a Store. docs/architecture.md, "Life of a version", tells
// the whole.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/base/mutex.h"
#include "src/tier/extents.h"
#include "src/tier/format.h"
#include "src/tier/transfer.h"
#include "src/tier/volumes.h"
#include "zinf/store.h"

namespace zinf::tier {

// Where a state's content is, in one table.
struct Entry {
  PlacementRef place = {};
  std::shared_ptr<const Checksums> sums = {};  // null: has none
  std::uint64_t bytes = 0;
  bool present = false;
  bool defined = false;  // in a committed table: the state was defined then
};

// By StateId::index. A committed one never changes; it may be shorter than the
// list of states.
using Table = std::vector<Entry>;

struct Version {
  VersionInfo info;
  std::shared_ptr<const Table> table;  // null when it is damaged
  BlobRef blob;                        // the table's bytes
  std::shared_ptr<const Placement> blob_place;
};

class StoreImpl {
 public:
  static Result<std::unique_ptr<StoreImpl>> create(const StoreOptions& options);
  static Result<std::unique_ptr<StoreImpl>> open(const StoreOptions& options);
  ~StoreImpl();
  StoreImpl(const StoreImpl&) = delete;
  StoreImpl& operator=(const StoreImpl&) = delete;

  Result<StateId> define(const StateSpec& spec);
  Result<StateId> find(const std::string& unit, const std::string& state) const;
  std::vector<StateSpec> states() const;
  bool has_content(StateId id) const;
  Status discard(StateId id);
  Status remove(StateId id);
  Status reserve(std::uint64_t state_bytes, std::uint64_t num_states);
  Store::Write put(StateId id, std::span<const std::byte> from);
  Store::Read get(StateId id, std::span<std::byte> into);
  Status set_extra(std::span<const std::byte> extra);
  Result<std::vector<std::byte>> extra();

  Status begin_step();
  Status commit(std::uint64_t step);
  Status keep(const std::string& name);
  Status drop(const std::string& name);
  Status rollback();
  Status load(std::uint64_t version);
  Result<VersionInfo> load_intact(std::uint64_t version);
  std::vector<VersionInfo> versions() const;
  Result<std::vector<StateSpec>> contents(std::uint64_t version) const;
  Result<std::vector<Damage>> verify(const Store::Progress& progress);

  Status damage() const;
  void set_verify(Verify verify) { verify_ = verify; }
  StoreStats stats() const;
  const StoreOptions& options() const { return options_; }
  Volumes& volumes() { return *shared_->volumes; }

 private:
  struct State {
    StateSpec spec;
    bool defined = false;
    Status error = {};  // of a failed put; healed by rollback() and load()
    std::shared_ptr<WriteOp> writing = nullptr;
    std::vector<std::weak_ptr<ReadOp>> reading = {};
  };
  // An attempt whose superblock may or may not be on the disk: its space must
  // not be used until a later one is.
  struct Attempt {
    std::vector<Version> versions;
    std::shared_ptr<const Placement> catalog;
  };
  enum class Sync : std::uint8_t { kMetadata, kEverything };
  using Key = std::pair<std::string, std::string>;

  StoreImpl(const StoreOptions& options, std::shared_ptr<Volumes> volumes);

  // store_impl.cpp
  std::shared_ptr<WriteOp> start_put(StateId id,
                                     std::span<const std::byte> from,
                                     std::shared_ptr<Checksums>& sums)
      ZINF_REQUIRES(order_);
  std::shared_ptr<WriteOp> refuse_put(StateId id, const Status& why)
      ZINF_EXCLUDES(mutex_);
  Status writable() const;
  std::uint64_t blocks_of(std::uint64_t bytes) const;
  // Waits for puts in flight; failed ones poison their states. The first error
  // in the working version, or ok.
  Status settle() ZINF_REQUIRES(order_) ZINF_EXCLUDES(mutex_);

  // states.cpp
  bool knows(StateId id) const ZINF_REQUIRES(mutex_);
  std::optional<std::uint32_t> removed_index(const StateSpec& spec) const
      ZINF_REQUIRES(mutex_);
  std::uint32_t new_index(const StateSpec& spec) ZINF_REQUIRES(mutex_);
  void set_defined(std::uint32_t index) ZINF_REQUIRES(mutex_);
  void set_removed(std::uint32_t index) ZINF_REQUIRES(mutex_);
  bool in_a_version(std::uint32_t index) const ZINF_REQUIRES(mutex_);
  // Frees the indexes of removed states that no version needs any more.
  void free_indexes() ZINF_REQUIRES(mutex_);
  Status check_room(const std::string& what, std::uint64_t num_states,
                    std::uint64_t bytes) const ZINF_REQUIRES(mutex_);
  // Whether the version's states can all be defined beside those that are.
  Status check_definitions(const Version& version) const ZINF_REQUIRES(mutex_);
  enum class Definition : std::uint8_t { kStays, kGoes };
  Status take_content(StateId id, Definition definition);

  // commit.cpp
  Status begin_step_ordered() ZINF_REQUIRES(order_);
  Status commit_ordered(std::uint64_t step) ZINF_REQUIRES(order_);
  Result<Version> write_table(std::uint64_t step) ZINF_REQUIRES(order_);
  TableRecord record_of(const Table& table) const ZINF_REQUIRES(mutex_);
  // Makes `next` the versions of the store, durably; on failure the present
  // ones stay.
  Status persist(std::vector<Version> next, Sync sync) ZINF_REQUIRES(order_);
  // The same for a superblock. `attempt` is what it refers to.
  Status publish(Superblock next, Attempt attempt) ZINF_REQUIRES(order_);
  Status sync(Sync what) ZINF_REQUIRES(order_);
  Status write_superblock(const Superblock& superblock) ZINF_REQUIRES(order_);
  Status withdraw(const Status& why) ZINF_REQUIRES(order_);
  void adopt(std::vector<Version> next) ZINF_REQUIRES(order_);
  std::string standing() const;  // "step 12 stands", for people

  // recovery.cpp
  Status recover();
  Status recover_from(const Superblock& superblock) ZINF_REQUIRES(order_);
  void reset(const Superblock& superblock) ZINF_REQUIRES(order_);
  std::uint32_t index_of(const StateSpec& spec) ZINF_REQUIRES(mutex_);
  Status check_durability() const;
  Geometry geometry() const ZINF_REQUIRES(order_);
  Status recover_version(const CatalogEntry& entry) ZINF_REQUIRES(order_);
  Result<std::shared_ptr<const Table>> read_table(const CatalogEntry& entry)
      ZINF_REQUIRES(order_);
  Result<std::shared_ptr<const Table>> rebuild(const TableRecord& record)
      ZINF_REQUIRES(order_, mutex_);
  void load_table(const Version* version) ZINF_REQUIRES(mutex_);
  const Version* newest_intact() const ZINF_REQUIRES(mutex_);
  Result<const Version*> version_of(std::uint64_t id) const
      ZINF_REQUIRES(mutex_);

  // verify.cpp
  struct Check;
  std::vector<Check> checks_of(const std::vector<Version>& versions);
  std::vector<Damage> run_checks(const std::vector<Check>& checks,
                                 const Store::Progress& progress);

  // Const after construction.
  const StoreOptions options_;  // but for what verify_ replaces
  std::atomic<Verify> verify_;
  const std::shared_ptr<Shared> shared_;  // its own synchronisation

  // Changes follow each other: held over the I/O of a commit and its kind, and
  // while a put starts, never by a get.
  Mutex order_;
  Superblock superblock_ ZINF_GUARDED_BY(order_);       // the durable one
  std::uint64_t sequence_ ZINF_GUARDED_BY(order_) = 0;  // used last
  std::size_t slot_ ZINF_GUARDED_BY(order_) = 0;        // to write next
  std::uint64_t next_version_ ZINF_GUARDED_BY(order_) = 1;
  std::shared_ptr<const Placement> catalog_ ZINF_GUARDED_BY(order_);
  std::vector<Attempt> limbo_ ZINF_GUARDED_BY(order_);
  bool in_step_ ZINF_GUARDED_BY(order_) = false;
  bool unsynced_ ZINF_GUARDED_BY(order_) = false;  // puts since the last sync
  // Placements by their first piece, while a store is opened.
  std::map<Piece, std::shared_ptr<const Placement>> found_
      ZINF_GUARDED_BY(order_);

  mutable Mutex mutex_;  // after order_; never held over I/O
  Capacity capacity_ ZINF_GUARDED_BY(mutex_);  // the durable superblock's
  // A state is defined (in index_), or removed but known to some version, or
  // its index is free.
  std::vector<State> states_ ZINF_GUARDED_BY(mutex_);
  std::map<Key, std::uint32_t> index_ ZINF_GUARDED_BY(mutex_);
  std::multimap<Key, std::uint32_t> removed_ ZINF_GUARDED_BY(mutex_);
  std::deque<std::uint32_t> free_ ZINF_GUARDED_BY(mutex_);  // oldest first
  std::uint64_t defined_bytes_ ZINF_GUARDED_BY(mutex_) = 0;
  Table working_ ZINF_GUARDED_BY(mutex_);
  std::uint64_t base_ ZINF_GUARDED_BY(mutex_) = 0;  // version it came from
  std::string base_label_ ZINF_GUARDED_BY(mutex_) = "none";
  Status working_error_ ZINF_GUARDED_BY(mutex_);           // a sync that failed
  Status damage_ ZINF_GUARDED_BY(mutex_);                  // when it was opened
  std::vector<Version> versions_ ZINF_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace zinf::tier
