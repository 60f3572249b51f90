// Puts and gets under way, and how a state's bytes meet its pieces.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/mutex.h"
#include "src/tier/extents.h"
#include "src/tier/volumes.h"

namespace zinf::tier {

using Checksums = std::vector<std::uint64_t>;  // one per block of a state

struct Counters {
  std::atomic<std::uint64_t> puts = 0;
  std::atomic<std::uint64_t> puts_in_place = 0;
  std::atomic<std::uint64_t> gets = 0;
  std::atomic<std::uint64_t> bytes_put = 0;
  std::atomic<std::uint64_t> bytes_got = 0;
  std::atomic<std::uint64_t> pieces_put = 0;
  std::atomic<std::uint64_t> commits = 0;
  std::atomic<std::uint64_t> commit_ns = 0;
  std::atomic<std::uint64_t> checksum_bytes = 0;
  std::atomic<std::uint64_t> checksum_ns = 0;
  std::vector<std::atomic<std::uint64_t>> volume_bytes_put;
};

// What operations of one store share; they may outlive it.
struct Shared {
  std::shared_ptr<Volumes> volumes;
  std::shared_ptr<Allocator> allocator;
  Counters counters;

  std::uint64_t block_bytes() const { return volumes->header().block_bytes; }
  // The checksum of one block, with its cost counted.
  std::uint64_t sum(std::span<const std::byte> block);
};

// "LABEL block 3, PATH at offset 4096, version step 7"
struct BlockName {
  std::string state;
  std::string version;  // empty: of none
  Status mismatch(const Shared& shared, const std::vector<Piece>& pieces,
                  std::uint64_t block, std::uint64_t wanted,
                  std::uint64_t got) const;
};

// Starts reading the whole pages [begin, begin + into.size()) of the bytes that
// the pieces hold.
void start_read(Volumes& volumes, const std::vector<Piece>& pieces,
                std::uint64_t begin, std::span<std::byte> into,
                std::vector<io::Request>& requests);

// Thread-safe: the owner of the handle and the store may both wait.
class WriteOp {
 public:
  explicit WriteOp(Status failed);
  // Starts the transfers. sum() must follow, on any thread.
  WriteOp(std::shared_ptr<Shared> shared,
          std::shared_ptr<const Placement> placement,
          std::span<const std::byte> from);

  // Fills in the checksums, or leaves them out when `sums` is null. The disk
  // works meanwhile.
  void sum(Checksums* sums);
  bool done();  // never waits
  Status wait();

  std::atomic<bool> asked = false;  // the handle's owner knows the outcome

 private:
  const std::shared_ptr<Shared> shared_;
  const std::span<const std::byte> from_;
  std::atomic<std::uint32_t> summed_ = 0;

  Mutex mutex_;  // held while waiting: waiters follow each other
  // Until it is done: the space must not be used again before.
  std::shared_ptr<const Placement> placement_ ZINF_GUARDED_BY(mutex_);
  std::optional<PageBuffer> tail_ ZINF_GUARDED_BY(mutex_);
  std::vector<io::Request> requests_ ZINF_GUARDED_BY(mutex_);
  Status status_ ZINF_GUARDED_BY(mutex_);
};

// Thread-safe, as WriteOp.
class ReadOp {
 public:
  explicit ReadOp(Status failed);
  // `sums` null: not compared.
  ReadOp(std::shared_ptr<Shared> shared,
         std::shared_ptr<const Placement> placement,
         std::shared_ptr<const Checksums> sums, std::span<std::byte> into,
         BlockName name);

  bool done();  // all bytes are there; never waits
  Status wait();

  std::atomic<bool> asked = false;

 private:
  Status finish() ZINF_REQUIRES(mutex_);

  const std::shared_ptr<Shared> shared_;
  const std::shared_ptr<const Checksums> sums_;
  const std::span<std::byte> into_;
  const BlockName name_;

  Mutex mutex_;  // held while waiting: waiters follow each other
  bool done_ ZINF_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const Placement> placement_ ZINF_GUARDED_BY(mutex_);
  std::optional<PageBuffer> tail_ ZINF_GUARDED_BY(mutex_);
  // In the order of the state's bytes; the tail's comes last.
  std::vector<io::Request> requests_ ZINF_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> ends_ ZINF_GUARDED_BY(mutex_);
  Status status_ ZINF_GUARDED_BY(mutex_);
};

}  // namespace zinf::tier
