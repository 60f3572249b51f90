#include "zinf/slab.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <map>
#include <optional>
#include <utility>

#include "src/base/align.h"
#include "src/base/mutex.h"
#include "src/base/strf.h"
#include "src/mem/virtual_range.h"
#include "zinf/bytes.h"
#include "zinf/log.h"

namespace zinf {

// The memory behind a slab.
struct SlabPiece {
  VirtualRange range;
  std::optional<Reservation> reservation;
  bool locked = false;

  std::size_t bytes() const { return range.bytes(); }
};

// What pool and slabs share: it lives as long as any of them.
class SlabStore {
 public:
  using Piece = std::unique_ptr<SlabPiece>;

  SlabStore(const SlabPoolOptions& options, std::optional<Budget> budget)
      : options_(options),
        budget_(std::move(budget)),
        locking_(options.locking) {}

  Result<Piece> take(std::size_t bytes) ZINF_EXCLUDES(mutex_) {
    if (Piece kept = take_kept(bytes)) return kept;
    Result<Piece> made = make(bytes);
    while (!made.ok() && made.status().code() == Code::kOverBudget &&
           (drop_oldest() || tighten() > 0)) {
      made = make(bytes);
    }
    if (made.ok()) note_in_use((*made)->bytes());
    return made;
  }

  void give(Piece piece) ZINF_EXCLUDES(mutex_) {
    std::list<Piece> dropped;  // unmapped after the lock is
    MutexLock lock(mutex_);
    loose_.erase(piece.get());
    stats_.in_use_bytes -= piece->bytes();
    stats_.idle_bytes += piece->bytes();
    kept_.push_front(std::move(piece));
    while (stats_.idle_bytes > options_.idle_bytes) drop_locked(dropped);
  }

  void trim() ZINF_EXCLUDES(mutex_) {
    while (drop_oldest()) {
    }
  }

  std::size_t tighten() ZINF_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    std::size_t given = 0;
    for (auto [piece, used_bytes] : loose_) {
      std::size_t over = piece->bytes() - used_bytes;
      piece->range.shrink(used_bytes);
      if (piece->reservation) piece->reservation->shrink(over);
      if (piece->locked) stats_.locked_bytes -= over;
      given += over;
    }
    loose_.clear();
    stats_.in_use_bytes -= given;
    return given;
  }

  SlabPoolStats stats() const ZINF_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return stats_;
  }

 private:
  // The kept slab that leaves the least over.
  Piece take_kept(std::size_t bytes) ZINF_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      std::size_t held = (*it)->bytes();
      if (held < bytes || held - bytes > held / 8) continue;
      if (best == kept_.end() || held < (*best)->bytes()) best = it;
    }
    if (best == kept_.end()) return nullptr;
    Piece piece = std::move(*best);
    kept_.erase(best);
    stats_.idle_bytes -= piece->bytes();
    if (piece->bytes() > bytes) loose_[piece.get()] = bytes;
    ++stats_.num_reused;
    note_in_use_locked(piece->bytes());
    return piece;
  }

  Result<Piece> make(std::size_t bytes) ZINF_EXCLUDES(mutex_) {
    auto piece = std::make_unique<SlabPiece>();
    if (budget_) {
      ZINF_ASSIGN(piece->reservation, budget_->reserve(options_.tag, bytes));
    }
    std::size_t alignment = bytes >= kHugePage ? kHugePage : kPage;
    ZINF_ASSIGN(piece->range, VirtualRange::allocate(bytes, alignment));
    if (bytes >= kHugePage) piece->range.advise_huge(0, bytes);
    lock_pages(*piece);
    MutexLock lock(mutex_);
    ++stats_.num_mapped;
    if (piece->locked) stats_.locked_bytes += bytes;
    return piece;
  }

  void lock_pages(SlabPiece& piece) ZINF_EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      if (locking_ == PageLocking::kNone) return;
    }
    if (mlock(piece.range.base(), piece.bytes()) == 0) {
      piece.locked = true;
      return;
    }
    int errnum = errno;
    MutexLock lock(mutex_);
    if (std::exchange(locking_, PageLocking::kNone) == PageLocking::kNone) {
      return;
    }
    log(LogLevel::kWarning,
        "I/O buffers are not locked in memory: %s (%s were; ulimit -l, or "
        "LimitMEMLOCK= in systemd, raises the limit)",
        Status::system("mlock", format_bytes(piece.bytes()), errnum)
            .text()
            .c_str(),
        format_bytes(stats_.locked_bytes).c_str());
  }

  bool drop_oldest() ZINF_EXCLUDES(mutex_) {
    std::list<Piece> dropped;  // unmapped after the lock is
    MutexLock lock(mutex_);
    if (kept_.empty()) return false;
    drop_locked(dropped);
    return true;
  }

  void drop_locked(std::list<Piece>& dropped) ZINF_REQUIRES(mutex_) {
    std::size_t bytes = kept_.back()->bytes();
    stats_.idle_bytes -= bytes;
    if (kept_.back()->locked) stats_.locked_bytes -= bytes;
    dropped.splice(dropped.begin(), kept_, std::prev(kept_.end()));
  }

  void note_in_use(std::size_t bytes) ZINF_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    note_in_use_locked(bytes);
  }

  void note_in_use_locked(std::size_t bytes) ZINF_REQUIRES(mutex_) {
    stats_.in_use_bytes += bytes;
    stats_.in_use_high_bytes =
        std::max(stats_.in_use_high_bytes, stats_.in_use_bytes);
  }

  // Const after construction.
  const SlabPoolOptions options_;
  const std::optional<Budget> budget_;

  mutable Mutex mutex_;
  PageLocking locking_ ZINF_GUARDED_BY(mutex_);    // kNone after a refusal
  std::list<Piece> kept_ ZINF_GUARDED_BY(mutex_);  // last used first
  // Slabs in use that have pages left over, and the bytes without those.
  std::map<SlabPiece*, std::size_t> loose_ ZINF_GUARDED_BY(mutex_);
  SlabPoolStats stats_ ZINF_GUARDED_BY(mutex_);
};

Slab::Slab() = default;

Slab::Slab(Slab&& other) noexcept
    : store_(std::move(other.store_)),
      piece_(std::move(other.piece_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Slab& Slab::operator=(Slab&& other) noexcept {
  std::swap(store_, other.store_);
  std::swap(piece_, other.piece_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Slab::~Slab() {
  if (piece_ != nullptr) store_->give(std::move(piece_));
}

Result<SlabPool> SlabPool::create(const SlabPoolOptions& options) {
  std::optional<Budget> budget;
  if (options.budget != nullptr) budget = *options.budget;
  return SlabPool(std::make_shared<SlabStore>(options, std::move(budget)));
}

Result<Slab> SlabPool::acquire(std::size_t bytes) {
  if (bytes == 0 || bytes > kAddressSpaceBytes) {
    return Status::error(
        Code::kInvalid,
        strf("slab of %zu bytes: not in 1 to %llu", bytes,
             static_cast<unsigned long long>(kAddressSpaceBytes)));
  }
  ZINF_ASSIGN(auto piece, store_->take(align_up(bytes, kPage)));
  Slab slab;
  slab.store_ = store_;
  slab.data_ = piece->range.base();
  slab.piece_ = std::move(piece);
  slab.bytes_ = bytes;
  return slab;
}

void SlabPool::trim() { store_->trim(); }
std::size_t SlabPool::tighten() { return store_->tighten(); }
SlabPoolStats SlabPool::stats() const { return store_->stats(); }

}  // namespace zinf
