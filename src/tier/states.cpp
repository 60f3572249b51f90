// Which states there are: definitions come, go, and come back with a version.
#include <algorithm>

#include "src/base/align.h"
#include "src/base/strf.h"
#include "src/tier/store_impl.h"
#include "zinf/bytes.h"

namespace zinf::tier {
namespace {

std::uint64_t padded(std::uint64_t bytes) {
  return align_up(bytes, std::uint64_t{kUnit});
}

Status check_spec(const StateSpec& spec) {
  std::string problem;
  if (spec.unit.empty() || spec.state.empty()) problem = "has no name";
  for (const std::string* text : {&spec.unit, &spec.state, &spec.dtype}) {
    if (text->size() > kMaxName) problem = "has a name of over 4096 bytes";
  }
  if (spec.shape.size() > 255) problem = "has over 255 dimensions";
  if (spec.shard_index >= spec.shard_count) {
    problem = strf("is shard %u of %u", spec.shard_index, spec.shard_count);
  }
  if (spec.bytes > std::uint64_t{INT64_MAX}) problem = "is too large";
  if (problem.empty()) return {};
  return Status::error(Code::kInvalid, "state " + spec.name() + " " + problem);
}

}  // namespace

bool StoreImpl::knows(StateId id) const {
  return id.index < states_.size() && states_[id.index].defined;
}

std::optional<std::uint32_t> StoreImpl::removed_index(
    const StateSpec& spec) const {
  auto [first, last] = removed_.equal_range({spec.unit, spec.state});
  for (auto it = first; it != last; ++it) {
    if (states_[it->second].spec == spec) return it->second;
  }
  return std::nullopt;
}

// Not the one that the name has just had: whoever still uses that StateId shall
// hear of it.
std::uint32_t StoreImpl::new_index(const StateSpec& spec) {
  auto free = free_.begin();
  while (free != free_.end() && states_[*free].spec.name() == spec.name()) {
    ++free;
  }
  if (free == free_.end() && free_.size() > 1) free = free_.begin();
  if (free != free_.end()) {
    std::uint32_t index = *free;
    free_.erase(free);
    states_[index].spec = spec;
    return index;
  }
  auto index = static_cast<std::uint32_t>(states_.size());
  states_.push_back({.spec = spec});
  working_.resize(states_.size());
  return index;
}

void StoreImpl::set_defined(std::uint32_t index) {
  State& state = states_[index];
  Key key{state.spec.unit, state.spec.state};
  auto [first, last] = removed_.equal_range(key);
  auto removed = std::find_if(
      first, last, [&](const auto& entry) { return entry.second == index; });
  if (removed != last) removed_.erase(removed);
  state.defined = true;
  index_[std::move(key)] = index;
  defined_bytes_ += padded(state.spec.bytes);
}

void StoreImpl::set_removed(std::uint32_t index) {
  State& state = states_[index];
  Key key{state.spec.unit, state.spec.state};
  state.defined = false;
  index_.erase(key);
  defined_bytes_ -= padded(state.spec.bytes);
  if (in_a_version(index)) {
    removed_.emplace(std::move(key), index);
  } else {
    free_.push_back(index);
  }
}

bool StoreImpl::in_a_version(std::uint32_t index) const {
  return std::any_of(versions_.begin(), versions_.end(),
                     [&](const Version& version) {
                       const Table* table = version.table.get();
                       return table != nullptr && index < table->size() &&
                              (*table)[index].defined;
                     });
}

void StoreImpl::free_indexes() {
  for (auto state = removed_.begin(); state != removed_.end();) {
    if (in_a_version(state->second)) {
      ++state;
    } else {
      free_.push_back(state->second);
      state = removed_.erase(state);
    }
  }
}

Status StoreImpl::check_room(const std::string& what, std::uint64_t num_states,
                             std::uint64_t bytes) const {
  std::uint64_t room =
      padded(capacity_.state_bytes) + capacity_.num_states * kUnit;
  std::uint64_t defined = index_.size() - 1;  // without the extra
  if (defined + num_states <= capacity_.num_states &&
      defined_bytes_ + bytes <= room) {
    return {};
  }
  return Status::error(
      Code::kNoSpace,
      strf("%s does not fit: the store has room for %llu states of %s together "
           "and has %llu of %s",
           what.c_str(), static_cast<unsigned long long>(capacity_.num_states),
           format_bytes(capacity_.state_bytes).c_str(),
           static_cast<unsigned long long>(defined),
           format_bytes(defined_bytes_).c_str()));
}

Status StoreImpl::check_definitions(const Version& version) const {
  const Table& table = *version.table;
  std::string label = "version " + version.info.label();
  std::uint64_t num_states = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (!table[i].defined || states_[i].defined) continue;
    const StateSpec& spec = states_[i].spec;
    if (index_.contains({spec.unit, spec.state})) {
      return Status::error(
          Code::kInvalid,
          strf("%s has state %s, which is defined otherwise now: remove that "
               "one first",
               label.c_str(), spec.name().c_str()));
    }
    ++num_states;
    bytes += padded(spec.bytes);
  }
  if (num_states == 0) return {};
  return check_room(label, num_states, bytes);
}

Result<StateId> StoreImpl::define(const StateSpec& spec) {
  ZINF_TRY(check_spec(spec));
  MutexLock lock(mutex_);
  auto found = index_.find({spec.unit, spec.state});
  if (found != index_.end()) {
    if (states_[found->second].spec == spec) return StateId{found->second};
    return Status::error(
        Code::kInvalid,
        strf("state %s is defined already with another dtype, shape, shard or "
             "size (%llu bytes there, %llu here)",
             spec.name().c_str(),
             static_cast<unsigned long long>(states_[found->second].spec.bytes),
             static_cast<unsigned long long>(spec.bytes)));
  }
  ZINF_TRY(writable());
  ZINF_TRY(check_room(strf("state %s of %s", spec.name().c_str(),
                           format_bytes(spec.bytes).c_str()),
                      1, padded(spec.bytes)));
  std::optional<std::uint32_t> index = removed_index(spec);
  if (!index) index = new_index(spec);
  set_defined(*index);
  return StateId{*index};
}

Result<StateId> StoreImpl::find(const std::string& unit,
                                const std::string& state) const {
  MutexLock lock(mutex_);
  auto found = index_.find({unit, state});
  if (found != index_.end() && found->second != 0) {
    return StateId{found->second};
  }
  return Status::error(Code::kNotFound,
                       "the store has no state " + unit + "/" + state);
}

std::vector<StateSpec> StoreImpl::states() const {
  MutexLock lock(mutex_);
  std::vector<StateSpec> specs;
  for (std::size_t i = 1; i < states_.size(); ++i) {
    if (states_[i].defined) specs.push_back(states_[i].spec);
  }
  return specs;
}

bool StoreImpl::has_content(StateId id) const {
  MutexLock lock(mutex_);
  return knows(id) && working_[id.index].present;
}

Status StoreImpl::discard(StateId id) {
  return take_content(id, Definition::kStays).in("discard");
}

Status StoreImpl::remove(StateId id) {
  return take_content(id, Definition::kGoes).in("remove");
}

Status StoreImpl::take_content(StateId id, Definition definition) {
  MutexLock order(order_);  // no put starts
  ZINF_TRY(writable());
  Entry entry;  // holds its space until what is under way has ended
  std::shared_ptr<WriteOp> writing;
  std::vector<std::shared_ptr<ReadOp>> readers;
  {
    MutexLock lock(mutex_);
    if (id.index == 0 || !knows(id)) {
      return Status::error(Code::kInvalid, "no such state");
    }
    State& state = states_[id.index];
    entry = std::exchange(working_[id.index], {});
    writing = std::exchange(state.writing, nullptr);
    for (auto& weak : std::exchange(state.reading, {})) {
      if (auto read = weak.lock()) readers.push_back(std::move(read));
    }
    state.error = {};
    if (definition == Definition::kGoes) set_removed(id.index);
  }
  if (writing != nullptr) (void)writing->wait();
  for (auto& read : readers) (void)read->wait();
  return {};
}

}  // namespace zinf::tier
