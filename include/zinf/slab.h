// Buffers for I/O: few, large, aligned, reused.
//
// O_DIRECT into fresh pages runs at less than half the speed of reused ones,
// so a slab that comes back is kept, as it is, for the next that fits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "zinf/budget.h"
#include "zinf/status.h"

namespace zinf {

class SlabStore;
struct SlabPiece;

enum class PageLocking : std::uint8_t { kNone, kWanted };

struct SlabPoolOptions {
  // Pays for all slabs, in use and kept. Null: nobody counts. Need not outlive
  // create().
  const Budget* budget = nullptr;
  Tag tag = Tag::kStaging;

  // kWanted: slabs are locked in memory (mlock). Where RLIMIT_MEMLOCK forbids
  // it the pool says so in one log line and goes on without.
  PageLocking locking = PageLocking::kNone;

  // Slabs that came back are kept up to this many bytes, the longest unused go
  // first. They also go when the budget is needed for a new slab.
  std::size_t idle_bytes = std::size_t{1} << 30;
};

struct SlabPoolStats {
  std::size_t in_use_bytes = 0;
  std::size_t in_use_high_bytes = 0;
  std::size_t idle_bytes = 0;
  std::size_t locked_bytes = 0;  // in use or idle, and locked in memory
  std::uint64_t num_mapped = 0;  // slabs ever made
  std::uint64_t num_reused = 0;  // slabs ever handed out again
};

// Memory of a SlabPool; goes back to it at destruction, also when the pool is
// gone. Move-only.
class Slab {
 public:
  Slab();  // holds nothing
  Slab(Slab&& other) noexcept;
  Slab& operator=(Slab&& other) noexcept;
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // As many bytes as were asked for. What was in them before is still there.
  std::span<std::byte> bytes() const { return {data_, bytes_}; }
  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  bool empty() const { return data_ == nullptr; }

 private:
  friend class SlabPool;

  std::shared_ptr<SlabStore> store_;
  std::unique_ptr<SlabPiece> piece_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Thread-safe. A child of fork() must not use it, nor destroy its slabs.
class SlabPool {
 public:
  static Result<SlabPool> create(const SlabPoolOptions& options = {});

  // Aligned to 4 KiB, from 2 MiB on to 2 MiB and in huge pages where the system
  // gives them. Sizes are rounded up to 4 KiB, never to powers of two; a kept
  // slab is used when at most an eighth of it is left over. kOverBudget when
  // the budget refuses even after all kept slabs and what is left over of
  // others went; kInvalid for 0 bytes or more than the address space.
  Result<Slab> acquire(std::size_t bytes);

  // Gives all kept slabs back to the system.
  void trim();
  // Gives back what is left over of slabs in use; returns how many bytes.
  std::size_t tighten();

  SlabPoolStats stats() const;

 private:
  explicit SlabPool(std::shared_ptr<SlabStore> store)
      : store_(std::move(store)) {}

  std::shared_ptr<SlabStore> store_;
};

}  // namespace zinf
