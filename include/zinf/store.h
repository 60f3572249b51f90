// The state store: every state of every unit on NVMe, crash-exact.
//
// A store is one preallocated volume file per path. A state is put and got as a
// whole; its bytes are cut into blocks that are spread over the paths by their
// bandwidth and have a checksum each. A version is the content of all states at
// one moment: commit() makes the working content a version, atomically; until
// then the old one stands, whatever happens. What no version refers to is
// overwritten in place, the rest is copied on write.
//
//   ZINF_ASSIGN(auto store, Store::create({.paths = {{"/mnt/nvme/run"}},
//                                          .state_bytes = total,
//                                          .num_states = count}));
//   ZINF_ASSIGN(StateId id, store->define({.unit = "fc.weight", ...}));
//   ZINF_TRY(store->put(id, data).wait());
//   ZINF_TRY(store->commit(step));
//   ZINF_TRY(store->keep("step-100"));
//
// Note [Versions and space]: the last two commits stay until the next step
// begins (so that ranks can agree on a common one); during a step the last one
// stays. With Durability::on_save it stays only while fewer than `kept`
// versions have a name. So a step needs room for (2 + kept) x states, or (1 +
// kept) x states with on_save (and kept x states when written once): that much
// is reserved by create() and reserve(),
// define() refuses states beyond it, and keep() more names than it was made
// for. No other call ever extends a file.
//
// Note [States come and go]: remove() takes a state out of the working version,
// not out of versions that were committed with it. rollback() and load() define
// again what was defined when their version was committed, under the StateId of
// then; states that were defined later stay too. They refuse, before anything
// changes, when a name has another definition now (kInvalid) or when all
// together are more than there is room for (kNoSpace): remove() what is in the
// way first. open() knows only the states of the version that it opens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zinf/io.h"
#include "zinf/status.h"

namespace zinf {

// When end_step() commits.
struct Durability {
  // 0: only when commit() is called (at a save); k: at every step that k
  // divides.
  std::uint64_t every = 0;
  // One version is written and named, and nothing after it.
  bool once = false;

  static Durability on_save() { return {}; }
  static Durability every_step() { return every_k(1); }
  static Durability every_k(std::uint64_t k) { return {.every = k}; }
  static Durability written_once() { return {.once = true}; }

  // Of all states that a step needs beside the versions that have a name.
  std::uint32_t copies() const { return once ? 0 : every == 0 ? 1 : 2; }

  bool due(std::uint64_t step) const { return every != 0 && step % every == 0; }
};

// When a block that was read is compared with its checksum.
enum class Verify : std::uint8_t {
  kAlways,
  kOnLoad,  // only what this process did not write or check itself
  kNever,   // and puts make no checksums
};

enum class Access : std::uint8_t {
  kWrite,   // alone: the run directories are locked
  kRead,    // looks without a lock; damage that allows it is tolerated. Nothing
            // is written, so a read-only file system will do
  kShared,  // as kRead, but no process writes meanwhile
};

// Under which names create() makes a store's files.
enum class Files : std::uint8_t {
  kNamed,     // volume.zinf in each path, which is the run directory
  kScratch,   // none, in each path: they are gone with the process
  kUnlinked,  // none either, until link()
};

struct StorePath {
  std::string path;  // the run directory; its parent must exist. See Files
  // Of the disk, for all that the store has in this directory; 0: none.
  std::uint64_t limit_bytes = 0;
  double weight = 0;  // share of the traffic, as GB/s; 0 on any: all measured
  std::vector<io::Fault> faults = {};  // for tests
};

struct StoreOptions {
  std::vector<StorePath> paths = {};

  Durability durability = Durability::on_save();
  Verify verify = Verify::kOnLoad;
  Access access = Access::kWrite;
  Files files = Files::kNamed;
  // When the newest version is damaged, open() takes the newest intact one
  // instead of failing, and says so in the log.
  bool fall_back = false;

  // What to make room for; open() takes it from the store, reserve() adds to
  // it.
  std::uint64_t state_bytes = 0;  // of all states together
  std::size_t num_states = 0;
  int kept = 1;                       // versions that may have a name
  std::uint64_t extra_bytes = 65536;  // largest extra()

  // Unit of striping and of checksums: a power of two from 4 KiB to 64 MiB.
  // open() takes it from the store.
  std::size_t block_bytes = std::size_t{1} << 20;
  // How transfers are made: one Io per path. Its faults are for every path.
  io::Options io = {};

  Status validate() const;

  // Of all volumes together, without their metadata.
  std::uint64_t data_bytes() const;
};

// What a state is. `unit` and `state` together are its name.
struct StateSpec {
  std::string unit;                  // "transformer.h.0.mlp.weight"
  std::string state;                 // "weight", "master", "exp_avg", ...
  std::string dtype;                 // "float32"
  std::vector<std::uint64_t> shape;  // of the whole tensor, before sharding
  std::uint32_t shard_index = 0;     // this is one of shard_count slices
  std::uint32_t shard_count = 1;
  std::uint64_t bytes = 0;  // of this shard

  std::string name() const { return unit + "/" + state; }
  bool operator==(const StateSpec&) const = default;
};

// A state of one Store, valid as long as it or until remove(): then another
// state may get the index, when no version needs it any more.
struct StateId {
  std::uint32_t index = 0;
  bool operator==(const StateId&) const = default;
};

struct VersionInfo {
  std::uint64_t id = 0;  // ascending, never used again
  std::uint64_t step = 0;
  std::int64_t created_ns = 0;     // since 1970
  bool recent = false;             // one of the last two commits
  std::vector<std::string> names;  // under which it is kept
  std::uint64_t num_states = 0;    // with content, without the extra
  std::uint64_t bytes = 0;         // with the extra
  Status damage;                   // why its table cannot be read, or ok

  std::string label() const;  // "step 12 (a, b)", for people
};

// One block whose content is not what was written, or that cannot be read.
struct Damage {
  std::string version;  // its label
  Status error;
};

struct StoreStats {
  std::uint64_t capacity_bytes = 0;  // for states, in all volumes
  std::uint64_t free_bytes = 0;      // of these
  std::uint64_t free_extents = 0;    // in so many pieces
  std::uint64_t state_bytes = 0;     // what there is room for: see reserve()
  std::uint64_t num_states = 0;
  std::uint64_t puts = 0;
  std::uint64_t puts_in_place = 0;  // the others went to free space
  std::uint64_t gets = 0;
  std::uint64_t bytes_put = 0;
  std::uint64_t bytes_got = 0;
  std::uint64_t pieces_put = 0;  // that puts were written in
  std::uint64_t commits = 0;
  double commit_seconds = 0;  // waiting for data, syncing, metadata
  // What puts and gets have hashed, and the CPU time of their threads for it.
  std::uint64_t checksum_bytes = 0;
  double checksum_seconds = 0;
  std::vector<std::uint64_t> volume_bytes_put;  // per path: the striping
  // What all volumes reached together, while they had something to do; 0:
  // nothing was moved yet.
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
  double io_cpu_seconds = 0;      // of the threads of their queues
  std::uint64_t io_requests = 0;  // that went to the disks
};

namespace tier {
class StoreImpl;
class WriteOp;
class ReadOp;
}  // namespace tier

// Thread-safe. Operations on one state follow each other in the order of the
// calls; those on different states are independent. commit() and its kind wait
// for puts in flight and hold off new ones, but not gets.
class Store {
 public:
  // One put or get under way. Move-only. Its memory must stay, and for a put
  // not change, until it is done; the destructor waits and logs an error that
  // nobody has asked for.
  class [[nodiscard]] Write {
   public:
    Write() = default;
    ~Write();
    Write(Write&& other) noexcept;
    Write& operator=(Write&& other) noexcept;
    bool done() const;  // never waits
    Status wait();      // may be called again; gives the same answer

   private:
    friend class tier::StoreImpl;
    std::shared_ptr<tier::WriteOp> op_;
  };
  class [[nodiscard]] Read {
   public:
    Read() = default;
    ~Read();
    Read(Read&& other) noexcept;
    Read& operator=(Read&& other) noexcept;
    bool done() const;  // all bytes are there; never waits
    Status wait();      // verifies too, on this thread

   private:
    friend class tier::StoreImpl;
    std::shared_ptr<tier::ReadOp> op_;
  };

  // Makes the run directories (0700) and volumes (0600) and reserves all space
  // on the disks; a disk that is too small is refused (kNoSpace, with what each
  // path needs and has) and nothing is left behind. A run directory that exists
  // already must be this user's, writable to nobody else and not in use
  // (kPermission), and hold no store (kInvalid).
  static Result<std::unique_ptr<Store>> create(const StoreOptions& options);

  // Opens what was created, at its newest version. The paths may come in any
  // order but must all be there. In use by another process: kPermission, with
  // its pid.
  static Result<std::unique_ptr<Store>> open(const StoreOptions& options);

  // Gives a store of Files::kUnlinked, in one path, its run directory: `path`,
  // which must not exist (kInvalid). The directory appears with everything that
  // was committed; after this a power loss does not take it away. On failure
  // nothing is left behind. Nothing is put afterwards.
  Status link(const std::string& path);

  ~Store();  // waits for what is under way; commits nothing
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Declares a state, or finds the one of that name; kInvalid when that one is
  // different, kNoSpace when there is no room left. Definitions outlive a
  // rollback.
  Result<StateId> define(const StateSpec& spec);
  Result<StateId> find(const std::string& unit, const std::string& state) const;
  std::vector<StateSpec> states() const;  // in the order of their StateId
  bool has_content(StateId id) const;     // in the working version

  // Takes the state's content out of the working version; the definition stays.
  // Its space is free at once, or when the last version that has it goes. A put
  // or get under way is waited for; a put that failed is forgotten.
  Status discard(StateId id);
  // The same, and the state is no longer defined: its name and room are free
  // for others. See Note [States come and go].
  Status remove(StateId id);

  // Makes room for so much in all, never less than now, as create() would; on
  // failure (kNoSpace, with what each path needs and has) nothing has changed.
  // After a power loss the store has the old room or the new. Puts and gets may
  // be under way.
  Status reserve(std::uint64_t state_bytes, std::size_t num_states);

  // The size must be the state's. A failed put poisons its state in the working
  // version: get() and commit() give the cause until rollback() or load().
  Write put(StateId id, std::span<const std::byte> from);
  // kNotFound when the working version has no content for it; kCorrupt when the
  // checksum does not match.
  Read get(StateId id, std::span<std::byte> into);

  // An opaque piece of the version: counters, random states, the caller's own.
  Status set_extra(std::span<const std::byte> extra);
  Result<std::vector<std::byte>> extra();

  // Makes room for a step: forgets the older of the last two commits, durably.
  // The first put after a commit does it by itself.
  Status begin_step();
  // Commits when the durability policy says so: when due() at that step.
  Status end_step(std::uint64_t step);
  bool due(std::uint64_t step) const;

  // Makes the working content a version. On failure the last one stands and the
  // working content is as before; when even that is not certain, the text says
  // so.
  Status commit(std::uint64_t step);

  // Gives the newest version a name, which pins it; takes the name away.
  Status keep(const std::string& name);
  Status drop(const std::string& name);

  // Makes the working content equal to the newest version (empty when there is
  // none), or to the given one. Uncommitted puts are lost, errors healed.
  Status rollback();
  Status load(std::uint64_t version);
  // Reads the whole version first; when it is damaged, the newest intact one is
  // taken instead, with a line in the log. Returns the one that was loaded.
  Result<VersionInfo> load_intact(std::uint64_t version);

  std::vector<VersionInfo> versions() const;  // oldest first
  Result<VersionInfo> find_version(const std::string& name) const;
  // What a version holds; its table must be intact.
  Result<std::vector<StateSpec>> contents(std::uint64_t version) const;

  // One of the two superblocks could not be read when the store was opened: a
  // crash in the middle of a commit leaves that, and so does a bad disk, which
  // may have taken the newest commit or name with it. Or, with Access::kRead, a
  // file is shorter than it was made.
  Status damage() const;

  // Reads every block of every version and compares checksums; damage() is in
  // its answer too.
  using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;
  Result<std::vector<Damage>> verify(const Progress& progress = {});

  // Replaces StoreOptions::verify for puts and gets that begin from now on. A
  // get does not compare what was put with Verify::kNever.
  void set_verify(Verify verify);

  // Memory for puts and gets that the kernel maps once (see io::Registration).
  std::vector<io::Registration> register_memory(std::span<std::byte> memory);

  StoreStats stats() const;
  std::vector<std::string> paths() const;  // by the volumes' index
  std::vector<double> weights() const;
  std::size_t block_bytes() const;

 private:
  explicit Store(std::unique_ptr<tier::StoreImpl> impl);
  std::unique_ptr<tier::StoreImpl> impl_;
};

// A run directory that was found.
struct FoundStore {
  std::string path;
  std::uint64_t bytes = 0;  // on the disk
  int owner = 0;            // pid of the process that has it locked; 0: stale;
                            // -1: in use, but by which is not known
  int volume = 0;           // which of
  int num_volumes = 0;      // so many; 0 when its header cannot be read
  // Of a run or a save that was killed before it had a store: nothing can be
  // read from it. It may be a file.
  bool leftover = false;
  std::uint64_t inode = 0;  // of the path
};

// The run directories at and up to five levels below `directory`, in order of
// their paths.
// Directories that cannot be read are left out, symbolic links not followed.
std::vector<FoundStore> find_stores(const std::string& directory);

// Removes a stale run directory: what a store put there, then the directory if
// it is empty. kPermission when it is locked (with the owner's pid), when it is
// another user's (root may), and when something else has its path now.
Status remove_store(const FoundStore& found);

}  // namespace zinf
