#include "src/tier/store_impl.h"

#include <algorithm>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"

namespace zinf::tier {
StoreImpl::StoreImpl(const StoreOptions& options,
                     std::shared_ptr<Volumes> volumes)
    : options_(options),
      verify_(options.verify),
      shared_(std::make_shared<Shared>()) {
  shared_->counters.volume_bytes_put =
      std::vector<std::atomic<std::uint64_t>>(volumes->count());
  shared_->volumes = std::move(volumes);
}

StoreImpl::~StoreImpl() {
  std::vector<std::shared_ptr<WriteOp>> writes;
  std::vector<std::shared_ptr<ReadOp>> reads;
  {
    MutexLock lock(mutex_);
    for (State& state : states_) {
      if (state.writing != nullptr) writes.push_back(state.writing);
      for (auto& weak : state.reading) {
        if (auto read = weak.lock()) reads.push_back(std::move(read));
      }
    }
  }
  for (auto& write : writes) (void)write->wait();
  for (auto& read : reads) (void)read->wait();
}

Result<std::unique_ptr<StoreImpl>> StoreImpl::create(
    const StoreOptions& options) {
  ZINF_TRY(options.validate());
  if (options.access != Access::kWrite) {
    return Status::error(Code::kInvalid, "a store is created for writing");
  }
  ZINF_ASSIGN(auto volumes, Volumes::create(options));
  std::unique_ptr<StoreImpl> store(new StoreImpl(options, std::move(volumes)));
  Status status = store->recover();
  if (status.ok()) return store;
  store->volumes().remove_files();
  return status;
}

Result<std::unique_ptr<StoreImpl>> StoreImpl::open(
    const StoreOptions& options) {
  ZINF_TRY(options.validate());
  ZINF_ASSIGN(auto volumes, Volumes::open(options));
  std::unique_ptr<StoreImpl> store(new StoreImpl(options, std::move(volumes)));
  ZINF_TRY(store->recover());
  ZINF_TRY(store->check_durability());
  return store;
}

Status StoreImpl::check_durability() const {
  const VolumeHeader& header = shared_->volumes->header();
  bool room = options_.durability.every == 0 || header.copies > 1;
  if (options_.access != Access::kWrite || room) return {};
  MutexLock lock(mutex_);
  std::uint64_t needed = (2 + header.kept) * capacity_.state_bytes;
  std::uint64_t found = (1 + header.kept) * capacity_.state_bytes;
  return Status::error(
      Code::kNoSpace,
      strf("%s was made for commits at saves: every step needs %s for states, "
           "it has %s",
           options_.paths[0].path.c_str(), format_bytes(needed).c_str(),
           format_bytes(found).c_str()));
}

Status StoreImpl::writable() const {
  if (options_.access == Access::kWrite) return {};
  return Status::error(Code::kInvalid, "the store is open for reading only");
}

std::uint64_t StoreImpl::blocks_of(std::uint64_t bytes) const {
  std::uint64_t block = shared_->block_bytes();
  return bytes / block + (bytes % block != 0 ? 1 : 0);
}

Store::Write StoreImpl::put(StateId id, std::span<const std::byte> from) {
  Store::Write write;
  std::shared_ptr<Checksums> sums;
  if (id.index == 0) {
    write.op_ = std::make_shared<WriteOp>(
        Status::error(Code::kInvalid, "put: no such state"));
    return write;
  }
  {
    MutexLock order(order_);
    write.op_ = start_put(id, from, sums);
  }
  write.op_->sum(sums.get());
  return write;
}

std::shared_ptr<WriteOp> StoreImpl::refuse_put(StateId id, const Status& why) {
  MutexLock lock(mutex_);
  State& state = states_[id.index];
  Status error = why.in("put " + state.spec.name());
  if (state.error.ok()) state.error = error;
  return std::make_shared<WriteOp>(error);
}

// Checks, makes room, and starts the transfers. `sums` is to be filled by the
// caller, outside the locks, when there are any to make.
std::shared_ptr<WriteOp> StoreImpl::start_put(
    StateId id, std::span<const std::byte> from,
    std::shared_ptr<Checksums>& sums) {
  auto refuse = [](const Status& why) {
    return std::make_shared<WriteOp>(why);
  };
  if (Status status = writable(); !status.ok()) return refuse(status);
  std::shared_ptr<WriteOp> before;
  {
    MutexLock lock(mutex_);
    if (!knows(id)) {
      return refuse(Status::error(Code::kInvalid, "put: no such state"));
    }
    const State& state = states_[id.index];
    if (id.index != 0 && state.spec.bytes != from.size()) {
      return refuse(Status::error(
          Code::kInvalid,
          strf("put %s: %zu bytes given, the state has %llu",
               state.spec.name().c_str(), from.size(),
               static_cast<unsigned long long>(state.spec.bytes))));
    }
    if (!state.error.ok()) return refuse(state.error);
    before = state.writing;
  }
  if (Status status = begin_step_ordered(); !status.ok()) {
    return refuse_put(id, status);
  }
  if (before != nullptr) {
    if (Status status = before->wait(); !status.ok()) {
      return refuse_put(id, status);
    }
  }

  std::shared_ptr<const Placement> place;
  std::vector<std::shared_ptr<ReadOp>> readers;
  bool in_place = false;
  {
    MutexLock lock(mutex_);
    const Entry& entry = working_[id.index];
    place = entry.place.get();
    in_place = entry.present && entry.bytes == from.size() &&
               (place == nullptr || place->num_tables == 1);
    for (auto& weak : states_[id.index].reading) {
      if (auto read = weak.lock()) readers.push_back(std::move(read));
    }
  }
  if (in_place) {
    for (auto& read : readers) (void)read->wait();
  } else {
    Result<std::vector<Piece>> pieces = shared_->allocator->take(from.size());
    if (!pieces.ok()) return refuse_put(id, pieces.status());
    place = std::make_shared<Placement>(shared_->allocator,
                                        std::move(pieces).value());
  }
  if (place == nullptr) {  // an empty state
    place =
        std::make_shared<Placement>(shared_->allocator, std::vector<Piece>());
  }
  if (verify_ != Verify::kNever) {
    sums = std::make_shared<Checksums>(blocks_of(from.size()));
  }
  place->trusted = true;
  auto op = std::make_shared<WriteOp>(shared_, place, from);
  if (in_place) ++shared_->counters.puts_in_place;
  unsynced_ = true;
  MutexLock lock(mutex_);
  working_[id.index] = {.place = PlacementRef(place),
                        .sums = sums,
                        .bytes = from.size(),
                        .present = true};
  states_[id.index].writing = op;
  return op;
}

Store::Read StoreImpl::get(StateId id, std::span<std::byte> into) {
  Store::Read read;
  auto refuse = [&](const Status& why) {
    read.op_ = std::make_shared<ReadOp>(why);
    return std::move(read);
  };
  while (true) {
    std::shared_ptr<WriteOp> writing;
    {
      MutexLock lock(mutex_);
      if (!knows(id)) {
        return refuse(Status::error(Code::kInvalid, "get: no such state"));
      }
      State& state = states_[id.index];
      std::string name = state.spec.name();
      if (!state.error.ok()) return refuse(state.error);
      const Entry& entry = working_[id.index];
      if (!entry.present) {
        return refuse(Status::error(
            Code::kNotFound, strf("get %s: version %s has no content for it",
                                  name.c_str(), base_label_.c_str())));
      }
      if (entry.bytes != into.size()) {
        return refuse(Status::error(
            Code::kInvalid,
            strf("get %s: room for %zu bytes given, the state has %llu",
                 name.c_str(), into.size(),
                 static_cast<unsigned long long>(entry.bytes))));
      }
      writing = state.writing;
      if (writing == nullptr) {
        Verify verify = verify_;
        bool compare =
            verify == Verify::kAlways ||
            (verify == Verify::kOnLoad && !entry.place.get()->trusted);
        read.op_ = std::make_shared<ReadOp>(
            shared_, entry.place.get(), compare ? entry.sums : nullptr, into,
            BlockName{std::move(name), base_ == 0 ? "" : base_label_});
        std::erase_if(state.reading, [](auto& weak) { return weak.expired(); });
        state.reading.push_back(read.op_);
        return read;
      }
    }
    Status status = writing->wait();
    MutexLock lock(mutex_);
    State& state = states_[id.index];
    if (state.writing != writing) continue;  // another put came
    state.writing = nullptr;
    if (!status.ok() && state.error.ok()) {
      state.error = status.in("put " + state.spec.name());
    }
  }
}

Status StoreImpl::set_extra(std::span<const std::byte> extra) {
  std::uint64_t most = shared_->volumes->header().extra_bytes;
  if (extra.size() > most) {
    return Status::error(
        Code::kInvalid,
        strf("extra has %zu bytes, the store was made for %llu (extra_bytes)",
             extra.size(), static_cast<unsigned long long>(most)));
  }
  std::shared_ptr<Checksums> sums;
  std::shared_ptr<WriteOp> op;
  {
    MutexLock order(order_);
    op = start_put({0}, extra, sums);
  }
  op->sum(sums.get());
  return op->wait();
}

Result<std::vector<std::byte>> StoreImpl::extra() {
  std::vector<std::byte> extra;
  {
    MutexLock lock(mutex_);
    extra.resize(working_[0].bytes);
    if (!working_[0].present && states_[0].error.ok()) return extra;
  }
  Store::Read read = get({0}, extra);
  ZINF_TRY(read.wait());
  return extra;
}

Status StoreImpl::settle() {
  std::vector<std::pair<std::size_t, std::shared_ptr<WriteOp>>> writes;
  {
    MutexLock lock(mutex_);
    for (std::size_t i = 0; i < states_.size(); ++i) {
      if (states_[i].writing != nullptr) {
        writes.emplace_back(i, states_[i].writing);
      }
    }
  }
  std::vector<Status> outcomes;
  outcomes.reserve(writes.size());
  for (auto& [index, write] : writes) outcomes.push_back(write->wait());
  MutexLock lock(mutex_);
  for (std::size_t i = 0; i < writes.size(); ++i) {
    State& state = states_[writes[i].first];
    state.writing = nullptr;
    if (!outcomes[i].ok() && state.error.ok()) {
      state.error = outcomes[i].in("put " + state.spec.name());
    }
  }
  for (const State& state : states_) {
    if (!state.error.ok()) return state.error;
  }
  return working_error_;
}

std::vector<VersionInfo> StoreImpl::versions() const {
  MutexLock lock(mutex_);
  std::vector<VersionInfo> infos;
  infos.reserve(versions_.size());
  for (const Version& version : versions_) infos.push_back(version.info);
  return infos;
}

Status StoreImpl::damage() const {
  MutexLock lock(mutex_);
  return damage_;
}

StoreStats StoreImpl::stats() const {
  const Counters& counters = shared_->counters;
  const Allocator& allocator = *shared_->allocator;
  Capacity capacity;
  {
    MutexLock lock(mutex_);
    capacity = capacity_;
  }
  StoreStats stats{
      .capacity_bytes = allocator.capacity_bytes(),
      .free_bytes = allocator.free_bytes(),
      .free_extents = allocator.num_free_extents(),
      .state_bytes = capacity.state_bytes,
      .num_states = capacity.num_states,
      .puts = counters.puts,
      .puts_in_place = counters.puts_in_place,
      .gets = counters.gets,
      .bytes_put = counters.bytes_put,
      .bytes_got = counters.bytes_got,
      .pieces_put = counters.pieces_put,
      .commits = counters.commits,
      .commit_seconds = static_cast<double>(counters.commit_ns) * 1e-9,
      .checksum_bytes = counters.checksum_bytes,
      .checksum_seconds = static_cast<double>(counters.checksum_ns) * 1e-9,
      .volume_bytes_put = {}};
  for (const auto& bytes : counters.volume_bytes_put) {
    stats.volume_bytes_put.push_back(bytes);
  }
  auto rate = [](std::uint64_t bytes, std::uint64_t ns) {
    return ns == 0 ? 0.0 : static_cast<double>(bytes) * 1e9 / double(ns);
  };
  for (const io::Stats& io : shared_->volumes->stats()) {
    stats.read_bytes_per_second += rate(io.bytes_read, io.read_ns);
    stats.write_bytes_per_second += rate(io.bytes_written, io.write_ns);
    stats.io_cpu_seconds += static_cast<double>(io.cpu_ns) * 1e-9;
    stats.io_requests += io.blocks;
  }
  return stats;
}

}  // namespace zinf::tier
