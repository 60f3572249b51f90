// What can be below a tier's memory: a store, or the host's memory.
#include <utility>

#include "src/base/mutex.h"
#include "zinf/residency.h"

namespace zinf {
namespace {

class StoreRead final : public Move {
 public:
  explicit StoreRead(Store::Read read) : read_(std::move(read)) {}
  bool done() override { return read_.done(); }
  Status wait() override { return read_.wait(); }

 private:
  Store::Read read_;
};

class StoreWrite final : public Move {
 public:
  explicit StoreWrite(Store::Write write) : write_(std::move(write)) {}
  bool done() override { return write_.done(); }
  Status wait() override { return write_.wait(); }

 private:
  Store::Write write_;
};

class StoreBacking final : public Backing {
 public:
  explicit StoreBacking(Store& store) : store_(store) {}

  Result<std::uint32_t> add(const StateSpec& spec) override {
    ZINF_ASSIGN(StateId id, store_.define(spec));
    return id.index;
  }
  Status remove(std::uint32_t state) override { return store_.remove({state}); }
  Status discard(std::uint32_t state) override {
    return store_.discard({state});
  }
  bool has_content(std::uint32_t state) const override {
    return store_.has_content({state});
  }
  std::unique_ptr<Move> read(std::uint32_t state,
                             std::span<std::byte> into) override {
    return store_read(store_, {state}, into);
  }
  std::unique_ptr<Move> write(std::uint32_t state,
                              std::span<const std::byte> from) override {
    return store_write(store_, {state}, from);
  }
  bool in_background() const override { return true; }
  bool due(std::uint64_t step) const override { return store_.due(step); }
  Status commit(std::uint64_t step) override { return store_.commit(step); }
  Status rollback() override { return store_.rollback(); }

 private:
  Store& store_;
};

// The copy out of the host's memory is made by whoever waits.
class HostRead final : public Move {
 public:
  HostRead(Residency& host, const DeviceCopies& copies, StateRef state,
           std::span<std::byte> into)
      : host_(host), copies_(copies), state_(state), into_(into) {
    host_.prefetch(state);
  }
  ~HostRead() override { (void)wait(); }

  bool done() override {
    MutexLock lock(mutex_);
    return done_;
  }
  Status wait() override {
    MutexLock lock(mutex_);
    if (!done_) status_ = copy();
    done_ = true;
    return status_;
  }

 private:
  Status copy() {
    ZINF_ASSIGN(Pin pin, host_.pin(state_, Use::kRead));
    return copies_.to_device(into_, pin.bytes());
  }

  Residency& host_;
  const DeviceCopies& copies_;
  const StateRef state_;
  const std::span<std::byte> into_;
  Mutex mutex_;
  bool done_ ZINF_GUARDED_BY(mutex_) = false;
  Status status_ ZINF_GUARDED_BY(mutex_);
};

class HostBacking final : public Backing {
 public:
  HostBacking(Residency& host, DeviceCopies copies, AddState add)
      : host_(host), copies_(std::move(copies)), add_(std::move(add)) {}

  Result<std::uint32_t> add(const StateSpec& spec) override {
    ZINF_ASSIGN(StateRef ref, add_(spec));
    return ref.index;
  }
  Status remove(std::uint32_t state) override {
    host_.remove({state});
    return {};
  }
  void rename(std::uint32_t state, const std::string& unit) override {
    host_.rename({state}, unit);
  }
  // The next write replaces it, which heals.
  Status discard(std::uint32_t) override { return {}; }
  bool has_content(std::uint32_t state) const override {
    return host_.place({state}) != Place::kEmpty;
  }
  std::unique_ptr<Move> read(std::uint32_t state,
                             std::span<std::byte> into) override {
    return std::make_unique<HostRead>(host_, copies_, StateRef{state}, into);
  }
  std::unique_ptr<Move> write(std::uint32_t state,
                              std::span<const std::byte> from) override {
    return finished_move(copy_out({state}, from));
  }
  bool due(std::uint64_t step) const override { return host_.due(step); }
  Status commit(std::uint64_t step) override { return host_.commit(step); }
  Status rollback() override { return host_.rollback(); }

 private:
  Status copy_out(StateRef state, std::span<const std::byte> from) {
    ZINF_ASSIGN(Pin pin, host_.pin(state, Use::kReplace));
    return copies_.to_host(pin.bytes(), from);
  }

  Residency& host_;
  const DeviceCopies copies_;
  const AddState add_;
};

}  // namespace

Allocate slab_memory(SlabPool pool) {
  return [pool](std::size_t bytes) mutable -> Result<Block> {
    ZINF_ASSIGN(Slab slab, pool.acquire(bytes));
    auto owner = std::make_shared<Slab>(std::move(slab));
    return Block{owner->bytes(), owner};
  };
}

std::unique_ptr<Move> store_read(Store& store, StateId id,
                                 std::span<std::byte> into) {
  return std::make_unique<StoreRead>(store.get(id, into));
}

std::unique_ptr<Move> store_write(Store& store, StateId id,
                                  std::span<const std::byte> from) {
  return std::make_unique<StoreWrite>(store.put(id, from));
}

std::shared_ptr<Backing> store_backing(Store& store) {
  return std::make_shared<StoreBacking>(store);
}

std::shared_ptr<Backing> host_backing(Residency& host, DeviceCopies copies,
                                      AddState add) {
  if (!add) {
    Home home = host.has_backing() ? Home::kBelow : Home::kMemory;
    add = [&host, home](const StateSpec& spec) { return host.add(spec, home); };
  }
  return std::make_shared<HostBacking>(host, std::move(copies), std::move(add));
}

}  // namespace zinf
