#include "zinf/comm.h"

#include "src/base/check.h"
#include "src/base/strf.h"

namespace zinf {
namespace {

std::uint64_t sum_of(const CommStats::Traffic (&lanes)[kNumLanes]) {
  std::uint64_t sum = 0;
  for (const CommStats::Traffic& lane : lanes) sum += lane.bytes;
  return sum;
}

}  // namespace

std::uint64_t CommStats::bytes_sent() const { return sum_of(sent); }
std::uint64_t CommStats::bytes_received() const { return sum_of(received); }

std::unique_ptr<Move> Comm::send(int to, Lane lane,
                                 std::span<const std::byte> from) {
  check_peer(to);
  count(sent_[static_cast<std::size_t>(lane)], from.size());
  return start_send(to, lane, from);
}

std::unique_ptr<Move> Comm::receive(int from, Lane lane,
                                    std::span<std::byte> into) {
  check_peer(from);
  count(received_[static_cast<std::size_t>(lane)], into.size());
  return start_receive(from, lane, into);
}

CommStats Comm::stats() const {
  CommStats stats;
  for (std::size_t i = 0; i < kNumLanes; ++i) {
    stats.sent[i] = {sent_[i].messages, sent_[i].bytes};
    stats.received[i] = {received_[i].messages, received_[i].bytes};
  }
  return stats;
}

void Comm::count(Counter& counter, std::size_t bytes) {
  counter.messages.fetch_add(1, std::memory_order_relaxed);
  counter.bytes.fetch_add(bytes, std::memory_order_relaxed);
}

void Comm::check_peer(int peer) const {
  ZINF_CHECK(peer >= 0 && peer < size_ && peer != rank_,
             "a message between rank %d and rank %d of %d", rank_, peer, size_);
}

Status rank_is_gone(int rank, int size, std::string_view why) {
  return Status::error(Code::kGone, strf("rank %d of %d is gone: %.*s", rank,
                                         size, len(why), why.data()));
}

}  // namespace zinf
