// What is behind an Exchange. exchange.cpp has what this rank asks for and
// sends, exchange_peers.cpp what it hears from others.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "src/base/mutex.h"
#include "src/shard/changes.h"
#include "src/shard/header.h"
#include "src/shard/passes.h"
#include "src/shard/small_pulls.h"
#include "zinf/exchange.h"

namespace zinf {
namespace shard {

inline std::vector<int> numbers_of(const Comm& comm) {
  std::vector<int> numbers;
  for (int rank = 0; rank < comm.size(); ++rank) {
    numbers.push_back(comm.number(rank));
  }
  return numbers;
}

// Transfers with their memory, as one.
class Bundle final : public Move {
 public:
  // Of an error.
  using Explain = std::function<Status(const Status&)>;
  explicit Bundle(Explain explain) : explain_(std::move(explain)) {}
  ~Bundle() override { (void)outcome(); }

  // A copy that lives as long.
  std::span<std::byte> keep(std::span<const std::byte> bytes) {
    kept_.emplace_back(bytes.begin(), bytes.end());
    return kept_.back();
  }
  void add(std::unique_ptr<Move> move) { moves_.push_back(std::move(move)); }

  bool done() override {
    return std::ranges::all_of(moves_,
                               [](const auto& move) { return move->done(); });
  }
  Status wait() override {
    Status status = outcome();
    return status.ok() ? status : explain_(status);
  }

 private:
  Status outcome() {
    Status first;
    for (const auto& move : moves_) {
      Status status = move->wait();
      if (first.ok()) first = status;
    }
    return first;
  }

  const Explain explain_;
  std::vector<std::vector<std::byte>> kept_;
  std::vector<std::unique_ptr<Move>> moves_;
};

}  // namespace shard

class Exchange::Impl {
 public:
  Impl(std::shared_ptr<Comm> comm, Keeper& keeper)
      : comm_(std::move(comm)),
        keeper_(keeper),
        passes_(shard::numbers_of(*comm_), comm_->total()),
        changes_(comm_->size(), comm_->rank()),
        begun_(static_cast<std::size_t>(comm_->size())),
        num_units_(static_cast<std::size_t>(comm_->size())),
        peers_(static_cast<std::size_t>(comm_->size())) {}
  ~Impl();

  Status start();
  std::uint32_t next_unit() const;
  std::uint32_t add(const UnitSpec& spec);
  Partition partition(std::uint32_t unit) const;
  std::span<std::byte> own_slice(std::uint32_t unit,
                                 std::span<std::byte> whole) const {
    return slice_of(shape_of(unit), comm_->rank(), whole);
  }
  std::unique_ptr<Move> pull(std::uint32_t unit, std::uint64_t passes,
                             std::span<std::byte> into);
  Status settled(std::uint32_t unit, std::uint64_t passes);
  Result<std::vector<int>> missing(std::uint64_t pass,
                                   std::chrono::milliseconds patience);
  void announce_change(std::uint32_t unit);
  void note_content(std::uint32_t unit, std::uint64_t hash);
  std::vector<std::uint64_t> contents() const;
  std::unique_ptr<Move> change(std::uint32_t unit,
                               std::function<Status()> make);
  void change_later(std::uint32_t unit, std::function<Status()> make) {
    (void)add_change(unit, std::move(make));
  }
  std::unique_ptr<Move> push(std::uint32_t unit, std::uint64_t pass,
                             std::span<const std::byte> gradient);
  std::unique_ptr<Move> close_pass(std::uint64_t pass, std::string_view what);
  Result<std::vector<std::uint32_t>> wait_closed(std::uint64_t pass);
  Status finish();
  void fail(const Status& why);
  Status status() const;

 private:
  struct Unit {
    UnitSpec spec;
    Partition partition;
    std::uint64_t changes = 0;  // that were made here
  };
  // A pass that not all ranks have closed, or nobody has asked for.
  struct Open {
    std::set<std::uint32_t> units;  // that it brings
    std::string what;               // of who closed it first
    int who = -1;
  };
  struct Peer {
    std::atomic<bool> has_failed = false;  // and listens no more
    // Of requests and of the receives for their answers; of headers and of what
    // belongs to them.
    Mutex order;
    // What is asked for with the next request, or when somebody needs it.
    std::shared_ptr<shard::SmallPulls> small ZINF_GUARDED_BY(order);
    std::thread requests;
    std::thread grads;
  };
  // What it takes to find a slice.
  struct Shape {
    Partition partition;
    std::size_t element_bytes;
  };
  Shape shape_of(std::uint32_t unit) const;
  static std::span<std::byte> slice_of(const Shape& shape, int rank,
                                       std::span<std::byte> whole);
  int number(int rank) const { return comm_->number(rank); }
  Mutex& order_with(int peer) {
    return peers_[static_cast<std::size_t>(peer)].order;
  }
  shard::Header header_for(shard::Kind kind, std::uint32_t unit,
                           std::uint64_t number) const;
  void send_header(shard::Bundle& bundle, int peer, Lane lane,
                   shard::Header& header);
  void for_others(const std::function<void(int)>& what) const;
  // Before all gradients that this rank sends from now on.
  void tell_others(shard::Header header);
  void add_small(shard::Bundle& bundle, int peer, const shard::Header& request,
                 std::span<std::byte> into);
  void ask_for_small(int peer, const std::shared_ptr<shard::SmallPulls>& small);

  // The threads of a peer.
  void serve_requests(int peer);
  void take_grads(int peer);
  Status serve(int peer, const shard::Header& request);
  Status serve_small(int peer, const shard::Header& head);
  Result<Block> wanted_slice(int peer, const shard::Header& request);
  Status receive_part(int peer, const shard::Header& header);
  Result<std::string> receive_text(int peer, const shard::Header& header);
  // Waits until this rank has the unit too.
  Status check_unit(int peer, const shard::Header& header);
  // Waits until this rank has made the sender's changes.
  Status wait_for_changes(int peer, const shard::Header& header);
  Status receive_close(int peer, const shard::Header& header);
  Status note_change(int peer, const shard::Header& header);
  std::shared_ptr<shard::Pending> add_change(std::uint32_t unit,
                                             std::function<Status()> make);
  Status make_changes();

  Status add_part(const PartName& part);
  // What a rank says when it closes a pass.
  struct Close {
    std::uint64_t pass = 0;
    std::size_t num_units = 0;  // that it has
    std::string what;
    std::vector<std::uint32_t> units = {};  // that it has pushed
  };
  Status note_close(int rank, const Close& close);
  // A rank has begun the pass: what it and this rank have changed before must
  // be the same.
  Status begin_pass_locked(int rank, std::uint64_t pass) ZINF_REQUIRES(mutex_);
  Status compare_units_locked(int rank) const ZINF_REQUIRES(mutex_);
  Status compare_closes_locked(int rank, const Close& close)
      ZINF_REQUIRES(mutex_);
  Status note_end(int rank);
  Status hand_over(std::uint64_t pass, const shard::Passes::Complete& complete);
  Status end_pass_if_over(std::uint64_t pass);

  // False when it had failed before.
  bool set_failed(const Status& why);
  // This rank has failed: all others hear why, then no messages go any more.
  void tell_failure(const Status& why);
  // fail() for a thread that must listen on: another rank that fails now too
  // sends its reason, and waits until this one takes it.
  void fail_and_listen(const Status& why);
  // Takes what follows a header, for nothing. False: it is too much.
  bool discard(int peer, const shard::Header& header);
  // Without telling others.
  void stop(const Status& why);
  // What has failed behind an error of a transfer: who finds another rank gone
  // may not have read yet what that one said last.
  Status explain(const Status& error);
  std::unique_ptr<shard::Bundle> bundle() {
    return std::make_unique<shard::Bundle>(
        [this](const Status& error) { return explain(error); });
  }

  const std::shared_ptr<Comm> comm_;
  Keeper& keeper_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Unit> units_ ZINF_GUARDED_BY(mutex_);
  shard::Passes passes_ ZINF_GUARDED_BY(mutex_);
  std::map<std::uint64_t, Open> open_ ZINF_GUARDED_BY(mutex_);
  shard::Changes changes_ ZINF_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<shard::Bundle>> announcements_
      ZINF_GUARDED_BY(mutex_);
  // How many passes each rank has begun, as far as this one knows.
  std::vector<std::uint64_t> begun_ ZINF_GUARDED_BY(mutex_);
  // Of each rank, when it closed its last pass.
  std::vector<std::size_t> num_units_ ZINF_GUARDED_BY(mutex_);
  Status failed_ ZINF_GUARDED_BY(mutex_);
  std::vector<Peer> peers_;
  std::thread teller_;  // of fail_and_listen()
};

}  // namespace zinf
