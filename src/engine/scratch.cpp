#include "src/engine/scratch.h"

#include <algorithm>
#include <utility>

#include "src/base/align.h"
#include "src/base/check.h"
#include "zinf/log.h"

namespace zinf {
namespace {

constexpr std::uint64_t kLeastBytes = 64 * kMiB;  // of the first store
constexpr std::size_t kLeastStates = 256;

std::uint64_t padded(std::uint64_t bytes) {
  return align_up(bytes, std::uint64_t{kPage});
}

std::optional<io::Profile> profile_of(const std::string& directory) {
  Result<io::Profile> profile = io::load_profile(directory);
  if (profile.ok()) return *profile;
  if (profile.status().code() != Code::kNotFound) {
    log(LogLevel::kWarning, "%s", profile.status().text().c_str());
  }
  return std::nullopt;
}

// A step reads and writes about the same.
double share_of(const io::Profile& profile) {
  return 2 / (1 / profile.read_gbps + 1 / profile.write_gbps);
}

}  // namespace

Scratch::Scratch(std::vector<NvmePath> parents) : parents_(std::move(parents)) {
  for (const NvmePath& parent : parents_) {
    profiles_.push_back(profile_of(parent.path));
  }
}

DiskSpeed Scratch::tuned() const {
  DiskSpeed sum;
  for (const auto& profile : profiles_) {
    if (!profile) return {};
    sum.read_bytes_per_second += profile->read_gbps * 1e9;
    sum.write_bytes_per_second += profile->write_gbps * 1e9;
  }
  return sum;
}

void Scratch::set_verify(Verify verify) {
  MutexLock lock(mutex_);
  verify_ = verify;
  if (store_ != nullptr) store_->set_verify(verify);
}

Status Scratch::make_room(std::uint64_t bytes, std::size_t num_states) {
  if (bytes <= room_bytes_ && num_states <= room_states_) return {};
  std::uint64_t room = std::max(room_bytes_, bytes);
  std::size_t states = std::max(room_states_, num_states);
  if (store_ != nullptr) {
    ZINF_TRY(store_->reserve(room, states));
  } else {
    StoreOptions options;
    options.files = Files::kScratch;
    for (std::size_t i = 0; i < parents_.size(); ++i) {
      options.paths.push_back(
          {.path = parents_[i].path,
           .limit_bytes = parents_[i].limit_bytes,
           .weight = profiles_[i] ? share_of(*profiles_[i]) : 0});
    }
    if (profiles_[0]) {
      options.io.block_bytes = profiles_[0]->block_bytes;
      options.io.depth = profiles_[0]->depth;
    }
    options.verify = verify_;
    options.state_bytes = room;
    options.num_states = states;
    options.kept = 0;
    ZINF_ASSIGN(store_, Store::create(options));
  }
  room_bytes_ = room;
  room_states_ = states;
  return {};
}

Status Scratch::reserve(std::uint64_t bytes, std::size_t num_states) {
  MutexLock lock(mutex_);
  return make_room(bytes, num_states);
}

StoreStats Scratch::stats() const {
  MutexLock lock(mutex_);
  return store_ == nullptr ? StoreStats() : store_->stats();
}

Result<std::uint32_t> Scratch::add(const StateSpec& spec) {
  MutexLock lock(mutex_);
  if (free_.empty()) {
    states_.push_back({spec, {}});
    return static_cast<std::uint32_t>(states_.size() - 1);
  }
  std::uint32_t state = free_.back();
  free_.pop_back();
  states_[state] = {spec, {}};
  return state;
}

Status Scratch::remove(std::uint32_t state) {
  MutexLock lock(mutex_);
  State gone = std::exchange(states_[state], {});
  free_.push_back(state);
  return undefine(gone);
}

Status Scratch::discard(std::uint32_t state) {
  MutexLock lock(mutex_);
  return undefine(states_[state]);
}

Status Scratch::undefine(State& state) {
  if (state.id == StateId{}) return {};
  ZINF_TRY(store_->remove(state.id));
  state.id = {};
  used_bytes_ -= padded(state.spec.bytes);
  --used_states_;
  return {};
}

Status Scratch::prepare(std::uint32_t state) {
  MutexLock lock(mutex_);
  return define(state).status();
}

bool Scratch::has_content(std::uint32_t state) const {
  MutexLock lock(mutex_);
  StateId id = states_[state].id;
  return id != StateId{} && store_->has_content(id);
}

Result<StateId> Scratch::define(std::uint32_t index) {
  State& state = states_[index];
  if (state.id != StateId{}) return state.id;
  std::uint64_t bytes = padded(state.spec.bytes);
  if (used_bytes_ + bytes > room_bytes_ || used_states_ + 1 > room_states_) {
    // In doubling steps; when the disk has no room for that, just enough.
    Status status =
        make_room(used_bytes_ + std::max({bytes, room_bytes_, kLeastBytes}),
                  used_states_ + std::max(room_states_, kLeastStates));
    if (!status.ok())
      ZINF_TRY(make_room(used_bytes_ + bytes, used_states_ + 1));
  }
  // The state's own name may be used by another unit, and may change.
  StateSpec spec = state.spec;
  spec.unit = "state";
  spec.state = std::to_string(index);
  ZINF_ASSIGN(state.id, store_->define(spec));
  used_bytes_ += bytes;
  ++used_states_;
  return state.id;
}

std::unique_ptr<Move> Scratch::read(std::uint32_t state,
                                    std::span<std::byte> into) {
  Store* store = nullptr;
  StateId id;
  {
    MutexLock lock(mutex_);
    store = store_.get();
    id = states_[state].id;
    ZINF_CHECK(id != StateId{}, "%s was never written",
               states_[state].spec.name().c_str());
  }
  return store_read(*store, id, into);
}

std::unique_ptr<Move> Scratch::write(std::uint32_t state,
                                     std::span<const std::byte> from) {
  Store* store = nullptr;
  StateId id;
  {
    MutexLock lock(mutex_);
    Result<StateId> defined = define(state);
    if (!defined.ok()) return finished_move(defined.status());
    store = store_.get();
    id = *defined;
  }
  return store_write(*store, id, from);
}

Status Scratch::commit(std::uint64_t) {
  return Status::error(Code::kUnsupported, "a scratch store has no versions");
}

Status Scratch::rollback() {
  return Status::error(Code::kUnsupported, "a scratch store has no versions");
}

}  // namespace zinf
