#include "src/tier/transfer.h"

#include <algorithm>

#include "src/base/align.h"
#include "src/base/cpu_time.h"
#include "src/base/strf.h"

namespace zinf::tier {
namespace {

// A request is cut so that its first bytes can be checked while the rest is
// still on its way.
constexpr std::uint64_t kMaxRequest = 8 * kMiB;

// Calls part(piece, skip, begin, bytes) over what holds [begin, end).
template <typename Part>
void for_each_part(const std::vector<Piece>& pieces, std::uint64_t begin,
                   std::uint64_t end, Part part) {
  std::uint64_t piece_begin = 0;
  for (const Piece& piece : pieces) {
    std::uint64_t from = std::max(begin, piece_begin);
    std::uint64_t to = std::min(end, piece_begin + piece.bytes);
    while (from < to) {
      std::uint64_t bytes = std::min(kMaxRequest, to - from);
      part(piece, from - piece_begin, from, bytes);
      from += bytes;
    }
    piece_begin += piece.bytes;
  }
}

bool all_done(const std::vector<io::Request>& requests) {
  return std::all_of(requests.begin(), requests.end(),
                     [](const io::Request& request) { return request.done(); });
}

std::uint64_t whole_pages(std::uint64_t bytes) {
  return align_down(bytes, std::uint64_t{kUnit});
}

}  // namespace

std::uint64_t Shared::sum(std::span<const std::byte> block) {
  std::uint64_t begin = thread_cpu_ns();
  std::uint64_t sum = checksum(block);
  counters.checksum_ns += thread_cpu_ns() - begin;
  counters.checksum_bytes += block.size();
  return sum;
}

Status BlockName::mismatch(const Shared& shared,
                           const std::vector<Piece>& pieces,
                           std::uint64_t block, std::uint64_t wanted,
                           std::uint64_t got) const {
  std::string where;
  std::uint64_t begin = block * shared.block_bytes();
  for_each_part(pieces, begin, begin + kUnit,
                [&](const Piece& piece, std::uint64_t skip, std::uint64_t,
                    std::uint64_t) {
                  unsigned long long offset = piece.offset + skip;
                  where =
                      strf("%s at offset %llu",
                           shared.volumes->file(piece.volume).c_str(), offset);
                });
  std::string in = version.empty() ? "" : ", version " + version;
  return Status::error(
      Code::kCorrupt,
      strf("the checksum of %s, block %llu, %s%s: wanted %016llx, got %016llx",
           state.c_str(), static_cast<unsigned long long>(block), where.c_str(),
           in.c_str(), static_cast<unsigned long long>(wanted),
           static_cast<unsigned long long>(got)));
}

void start_read(Volumes& volumes, const std::vector<Piece>& pieces,
                std::uint64_t begin, std::span<std::byte> into,
                std::vector<io::Request>& requests) {
  for_each_part(pieces, begin, begin + into.size(),
                [&](const Piece& piece, std::uint64_t skip, std::uint64_t from,
                    std::uint64_t bytes) {
                  requests.push_back(volumes.read(
                      piece, skip, into.subspan(from - begin, bytes)));
                });
}

WriteOp::WriteOp(Status failed) : summed_(1), status_(std::move(failed)) {}

WriteOp::WriteOp(std::shared_ptr<Shared> shared,
                 std::shared_ptr<const Placement> placement,
                 std::span<const std::byte> from)
    : shared_(std::move(shared)), from_(from) {
  Counters& counters = shared_->counters;
  std::vector<io::Request> requests;
  std::uint64_t whole = whole_pages(from.size());
  auto start = [&](const Piece& piece, std::uint64_t skip,
                   std::span<const std::byte> data) {
    requests.push_back(shared_->volumes->write(piece, skip, data));
    counters.volume_bytes_put[piece.volume] += data.size();
  };
  for_each_part(placement->pieces, 0, whole,
                [&](const Piece& piece, std::uint64_t skip, std::uint64_t begin,
                    std::uint64_t bytes) {
                  start(piece, skip, from.subspan(begin, bytes));
                });
  if (whole < from.size()) {
    // The last page is padded with zeros, so that it is a direct write too.
    PageBuffer& page = tail_.emplace(kUnit);
    auto rest = from.subspan(whole);
    std::span<std::byte> tail = page.span();
    std::copy(rest.begin(), rest.end(), tail.begin());
    for_each_part(placement->pieces, whole, whole + kUnit,
                  [&](const Piece& piece, std::uint64_t skip, std::uint64_t,
                      std::uint64_t) { start(piece, skip, tail); });
  }
  ++counters.puts;
  counters.bytes_put += from.size();
  counters.pieces_put += placement->pieces.size();
  MutexLock lock(mutex_);
  placement_ = std::move(placement);
  requests_ = std::move(requests);
}

void WriteOp::sum(Checksums* sums) {
  if (sums != nullptr) {
    std::uint64_t block = shared_->block_bytes();
    for (std::size_t i = 0; i < sums->size(); ++i) {
      std::uint64_t begin = i * block;
      std::uint64_t bytes =
          std::min<std::uint64_t>(block, from_.size() - begin);
      (*sums)[i] = shared_->sum(from_.subspan(begin, bytes));
    }
  }
  // Release: whoever waited sees the checksums.
  summed_.store(1, std::memory_order_release);
  summed_.notify_all();
}

bool WriteOp::done() {
  if (summed_.load(std::memory_order_acquire) == 0 || !mutex_.try_lock()) {
    return false;
  }
  bool done = all_done(requests_);
  mutex_.unlock();
  return done;
}

Status WriteOp::wait() {
  summed_.wait(0, std::memory_order_acquire);
  MutexLock lock(mutex_);
  if (requests_.empty()) return status_;
  status_ = io::wait_all(requests_);
  requests_.clear();
  tail_.reset();
  placement_.reset();
  return status_;
}

ReadOp::ReadOp(Status failed) : done_(true), status_(std::move(failed)) {}

ReadOp::ReadOp(std::shared_ptr<Shared> shared,
               std::shared_ptr<const Placement> placement,
               std::shared_ptr<const Checksums> sums, std::span<std::byte> into,
               BlockName name)
    : shared_(std::move(shared)),
      sums_(std::move(sums)),
      into_(into),
      name_(std::move(name)) {
  std::vector<io::Request> requests;
  std::vector<std::uint64_t> ends;
  std::uint64_t whole = whole_pages(into.size());
  for_each_part(placement->pieces, 0, whole,
                [&](const Piece& piece, std::uint64_t skip, std::uint64_t begin,
                    std::uint64_t bytes) {
                  requests.push_back(shared_->volumes->read(
                      piece, skip, into.subspan(begin, bytes)));
                  ends.push_back(begin + bytes);
                });
  if (whole < into.size()) {
    tail_.emplace(kUnit);
    start_read(*shared_->volumes, placement->pieces, whole, tail_->span(),
               requests);
    ends.push_back(into.size());
  }
  ++shared_->counters.gets;
  shared_->counters.bytes_got += into.size();
  MutexLock lock(mutex_);
  placement_ = std::move(placement);
  requests_ = std::move(requests);
  ends_ = std::move(ends);
}

bool ReadOp::done() {
  if (!mutex_.try_lock()) return false;
  bool done = all_done(requests_);
  mutex_.unlock();
  return done;
}

Status ReadOp::wait() {
  MutexLock lock(mutex_);
  if (!done_) {
    status_ = finish();
    done_ = true;
    requests_.clear();
    tail_.reset();
    placement_.reset();
  }
  return status_;
}

// Compares blocks as soon as they are there; the disk works on the rest.
Status ReadOp::finish() {
  std::uint64_t block = shared_->block_bytes();
  std::size_t next = 0;  // block to compare
  Status first;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    Status status = requests_[i].wait();
    if (!status.ok()) {
      if (first.ok()) first = status.in(name_.state);
      continue;  // nothing may be under way when the caller goes on
    }
    if (!first.ok()) continue;
    if (tail_ && i + 1 == requests_.size()) {
      std::uint64_t whole = whole_pages(into_.size());
      std::copy_n(tail_->span().begin(), into_.size() - whole,
                  into_.begin() + static_cast<std::ptrdiff_t>(whole));
    }
    while (sums_ != nullptr && next < sums_->size()) {
      std::uint64_t begin = next * block;
      std::uint64_t end = std::min<std::uint64_t>(begin + block, into_.size());
      if (end > ends_[i]) break;
      std::uint64_t got = shared_->sum(into_.subspan(begin, end - begin));
      std::uint64_t wanted = (*sums_)[next];
      if (got != wanted) {
        first = name_.mismatch(*shared_, placement_->pieces, next, wanted, got);
        break;
      }
      ++next;
    }
  }
  if (first.ok() && sums_ != nullptr) placement_->trusted = true;
  return first;
}

}  // namespace zinf::tier
