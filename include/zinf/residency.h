// Where each state is: in a tier's memory, below it, or on its way.
//
// A Residency is one tier of memory above a Backing: host memory above the
// Store on NVMe, or a device's memory above the host's Residency. pin() brings
// a state into memory, and it stays there while it is pinned; later it is
// dropped when its memory is needed, after a write when its content is new.
//
//   ZINF_ASSIGN(StateRef weight, host.add(spec, Home::kBelow));
//   host.prefetch(weight);
//   ZINF_ASSIGN(Pin pin, host.pin(weight, Use::kChange));
//   update(pin.bytes());
//
// Note [Places]: every change of a state's place goes through one function that
// knows these arrows and no others; anything else is a bug and ends the
// program.
//
//   kEmpty ----- replace ----> kDirty <-- replace -- kAbsent, kFailed
//   kResident -- change -----> kDirty -- write ----> kWriting --> kResident
//   kAbsent ---- read -------> kReading ----------> kResident
//   kResident -- drop -------> kAbsent
//   kReading, kWriting ------- error -------------> kFailed
//   kWriting --- no room ----> kDirty
//   kReading --- no room below, and nobody waits --> kAbsent
//
// rollback() leads from every place to kAbsent or kEmpty. kFailed keeps its
// error: every use gives it until then, or until the content is replaced. A
// state that is being written can be
// read from memory meanwhile; whoever wants to change it waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zinf/block.h"
#include "zinf/move.h"
#include "zinf/slab.h"
#include "zinf/status.h"
#include "zinf/store.h"

namespace zinf {

enum class Place : std::uint8_t {
  kEmpty,     // no content anywhere
  kAbsent,    // content below only
  kReading,   // on its way into memory
  kResident,  // in memory, and the same below
  kDirty,     // in memory; below is an older content or none
  kWriting,   // in memory, on its way below
  kFailed,    // a move failed
};
inline constexpr std::size_t kNumPlaces = 7;
std::string_view place_name(Place place);

// Whether Note [Places] has an arrow between them.
bool may_move(Place from, Place to);

// Where a state lives when nobody uses it.
enum class Home : std::uint8_t {
  kMemory,  // never dropped; goes below at commits only
  kBelow,   // in memory until that is needed
  kAway,    // as kBelow, but few of them at a time: see away_limit_bytes
};

// Which states leave memory first when room is needed.
enum class Worth : std::uint8_t {
  // The one used last goes first: they are used in the same order again and
  // again, so it is the one that is needed last.
  kLow,
  kMiddle,  // the longest unused goes first, as for kHigh
  kHigh,
};

enum class Use : std::uint8_t {
  kRead,
  kChange,   // the content is new afterwards
  kReplace,  // as kChange, and the old content does not matter
};

// kOverBudget when there is none now.
using Allocate = std::function<Result<Block>(std::size_t bytes)>;
// Blocks from a pool. A SlabPool is a handle: the copy is the same pool.
Allocate slab_memory(SlabPool pool);

// What is below a tier's memory. Thread-safe; states are named by what add()
// gave for them.
class Backing {
 public:
  virtual ~Backing() = default;

  virtual Result<std::uint32_t> add(const StateSpec& spec) = 0;
  virtual Status remove(std::uint32_t state) = 0;
  // How errors call the state's unit from now on, where they do.
  virtual void rename(std::uint32_t /*state*/, const std::string& /*unit*/) {}
  // Its content does not matter any more, nor a write of it that failed.
  virtual Status discard(std::uint32_t state) = 0;
  virtual bool has_content(std::uint32_t state) const = 0;
  virtual std::unique_ptr<Move> read(std::uint32_t state,
                                     std::span<std::byte> into) = 0;
  virtual std::unique_ptr<Move> write(std::uint32_t state,
                                      std::span<const std::byte> from) = 0;

  // Whether the durability policy wants a commit at the end of this step.
  virtual bool due(std::uint64_t step) const = 0;
  virtual Status commit(std::uint64_t step) = 0;
  virtual Status rollback() = 0;

  // Whether write() returns before the content is there: then it can be used to
  // write ahead of need.
  virtual bool in_background() const { return false; }
  // A place for the state's content, so that a write cannot fail for want of
  // one: kNoSpace, and nothing has changed. Others may discard() theirs then.
  virtual Status prepare(std::uint32_t) { return {}; }
};

// A state of one Residency, valid until it is removed.
struct StateRef {
  std::uint32_t index = 0;
  bool operator==(const StateRef&) const = default;
};

struct ResidencyStats {
  std::uint64_t memory_bytes = 0;  // of all states in memory or on their way
  std::uint64_t memory_high_bytes = 0;
  std::uint64_t away_bytes = 0;  // of these, with Home::kAway
  std::uint64_t num_states = 0;
  std::uint64_t pins = 0;     // ever
  std::uint64_t fetches = 0;  // of these, with a read that nobody had started
  std::uint64_t late = 0;     // of these, with a read that was still under way
  std::uint64_t read_wait_ns = 0;   // in pin(), for reads
  std::uint64_t write_wait_ns = 0;  // in pin(), for memory and for writes; and
                                    // in make_room()
  std::uint64_t reads = 0;
  std::uint64_t writes = 0;
  std::uint64_t drops = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
};

// A state that somebody has waited for, in sum.
struct StateWait {
  std::string name;
  std::uint64_t ns = 0;
};

// Of a state; one that was removed is not at home in memory.
struct StateSize {
  std::uint64_t bytes = 0;
  Home home = Home::kMemory;
};

// What the owner of a state says when it is about to leave memory.
enum class Leave : std::uint8_t {
  kDrop,
  kKeep,     // not now: somebody has its address
  kChanged,  // its content was changed without a pin: it must be written first
};

// Asks the owner of a state that nobody has pinned, before it leaves memory. It
// may move the content, with the same bytes, to other memory: then `block` is
// that.
using AskLeave =
    std::function<Leave(StateRef state, void* owner, Block& block)>;

struct ResidencyOptions {
  Allocate allocate;                 // memory for states
  std::shared_ptr<Backing> backing;  // null: everything stays in memory
  // Called with the tier locked: it must not call back, and must not block.
  // None: kDrop.
  AskLeave leaving = {};
  // Asked for bytes when nothing of this tier can leave memory any more:
  // whether somebody else gave some back.
  std::function<bool(std::uint64_t bytes)> others = {};
  // States with Home::kAway start to leave at the end of a pin while more than
  // this (or, if that is more, two of the largest) is in memory of them
  // together that nobody expects (see expect()). As much again may be on its
  // way out; for more the pin's end waits. 0: of these none stays.
  std::uint64_t away_limit_bytes = 0;
};

class Residency;

// Keeps a state in memory. Move-only; must not outlive its Residency.
class [[nodiscard]] Pin {
 public:
  Pin() = default;  // holds nothing
  Pin(Pin&& other) noexcept;
  Pin& operator=(Pin&& other) noexcept;
  ~Pin();

  std::span<std::byte> bytes() const { return bytes_; }
  bool empty() const { return residency_ == nullptr; }

 private:
  friend class Residency;
  Residency* residency_ = nullptr;
  StateRef state_;
  Use use_ = Use::kRead;
  std::span<std::byte> bytes_;
};

// Thread-safe.
class Residency {
 public:
  explicit Residency(ResidencyOptions options);
  ~Residency();  // waits for moves under way; writes nothing. No pins are left
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // A state without content, or with what the backing has for it. Without a
  // backing its home must be kMemory. `owner` is for leaving().
  Result<StateRef> add(const StateSpec& spec, Home home, void* owner = nullptr,
                       Worth worth = Worth::kMiddle);
  // Memory with the content of a state that is empty.
  void give(StateRef state, Block block);
  // Another name for its unit, in the texts of errors; below it keeps the old.
  void rename(StateRef state, const std::string& unit);
  // A state that is empty is zeros from now on: it has no memory, here or
  // below, until it is used. REQUIRES memory that the host may touch.
  void start_as_zeros(StateRef state);
  // Gives its memory and its place below back, at once or when the last pin
  // goes; a move under way is waited for.
  void remove(StateRef state);

  // Waits until the state is in memory. The errors, which begin with the
  // state's name: what a move of this state has met; kNotFound without content
  // (not with kReplace); kOverBudget when all that could be dropped is not
  // enough.
  Result<Pin> pin(StateRef state, Use use);

  // Starts reading if it is absent, never waits and never makes room: without
  // memory it does nothing. Errors surface at the next use.
  void prefetch(StateRef state);

  // For somebody who knows the order of uses. None of these does anything to a
  // state that was removed.
  //
  // By a count of uses that is `now`, the state is used next when the count is
  // `next`; 0: nobody knows. Who needs room takes it from what is used last.
  void expect(StateRef state, std::uint64_t now, std::uint64_t next);
  // As prefetch(), but waits until what is used later, or is on its way out,
  // has made room. False: there is none.
  bool fetch(StateRef state);
  // Starts writing new content below; it stays in memory.
  void write(StateRef state);
  // The same, and waits: then its content is below too. What its write has met;
  // kInvalid while somebody is changing it, kNotFound without content.
  Status write_and_wait(StateRef state);
  // Lets the state leave memory as soon as nobody has it pinned; new content is
  // written first, in the background. Nothing happens to a home of kMemory.
  void evict(StateRef state);
  // The same, and waits: then its content is below alone, and stays there until
  // somebody wants it. What its write has met (after kOverBudget it is in
  // memory as before); kInvalid when it is in use.
  Status leave(StateRef state);

  // Drops states, in the order of their Worth, until so many bytes were given
  // back or nothing is left to drop. Returns how many. What finds no room below
  // stays in memory, as it is.
  std::uint64_t make_room(std::uint64_t bytes);
  // As make_room(), but it never waits: of what nobody has pinned, drops what
  // is the same below; what somebody expects last of all.
  std::uint64_t drop_idle(std::uint64_t bytes);
  // Why the last state that was to leave memory found no room below, or ok.
  Status refusal() const;

  // Writes all new content below and waits. The first error; the others stick
  // to their states too. kInvalid while somebody is changing a state. What was
  // changed without a pin (Leave::kChanged) is not among it.
  Status flush();

  // flush(), then the backing's commit.
  Status commit(std::uint64_t step);
  // The same if the durability policy says so: between commits the content of
  // a home of kMemory is in memory alone.
  Status end_step(std::uint64_t step);
  bool due(std::uint64_t step) const;
  // Every state is what it was at the last commit; errors are healed. kInvalid
  // while anything is pinned.
  Status rollback();

  // The memory of a pinned state; it stays while its owner is held, whatever
  // becomes of the state.
  Block block(const Pin& pin) const;
  // The state's content is in this memory from now on, where the caller has
  // copied it. Other pins keep the old memory until they end; renew() leads
  // such a pin to the new.
  void replace(Pin& pin, Block block);
  void renew(Pin& pin) const;
  // Has `move` put the content elsewhere, with the tier locked. False when
  // others have it pinned, a move of it is under way, or `move` says so.
  bool relocate(Pin& pin, const std::function<bool(Block& block)>& move);

  bool has_backing() const;
  std::uint64_t away_limit() const;  // see away_limit_bytes
  Place place(StateRef state) const;
  std::uint32_t below(StateRef state) const;  // what the backing calls it
  ResidencyStats stats() const;
  // By the index of their references.
  std::vector<StateSize> sizes() const;
  // In pin(), since the last call: the longest first.
  std::vector<StateWait> take_waits(std::size_t most);

 private:
  friend class Pin;
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Host memory above NVMe. The store must outlive it.
std::shared_ptr<Backing> store_backing(Store& store);

// For backings of other kinds.
std::unique_ptr<Move> store_read(Store& store, StateId id,
                                 std::span<std::byte> into);
std::unique_ptr<Move> store_write(Store& store, StateId id,
                                  std::span<const std::byte> from);

// Moves bytes between a device's memory and the host's. The host's were read,
// or are there, when it returns; a device may have them later, and orders its
// own work after that. Called by threads of the tier's own.
struct DeviceCopies {
  std::function<Status(std::span<std::byte> device,
                       std::span<const std::byte> host)>
      to_device;
  std::function<Status(std::span<std::byte> host,
                       std::span<const std::byte> device)>
      to_host;
};

// Where the host has a device's state: in its own tier, or among the wholes of
// what is split over ranks (zinf/gather_tier.h), where somebody else removes
// it.
struct HostState {
  StateRef state;
  bool whole = false;
};
// How a device's states are added to the host's.
using AddState = std::function<Result<HostState>(const StateSpec& spec)>;

// A device's memory above the host's. Without `add`, states get a home below
// the host's memory, or in it when the host has no backing. The host's
// Residency, and that of wholes, must outlive it; the device's is committed and
// rolled back, not the host's. New content of a whole is written on from there.
std::shared_ptr<Backing> host_backing(Residency& host, DeviceCopies copies,
                                      AddState add = {},
                                      Residency* wholes = nullptr);

}  // namespace zinf
