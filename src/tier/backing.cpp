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

}  // namespace zinf
