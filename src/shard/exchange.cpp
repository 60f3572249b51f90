#include "zinf/exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "src/base/check.h"
#include "src/base/mutex.h"
#include "src/base/start_thread.h"
#include "src/base/strf.h"
#include "src/shard/passes.h"

namespace zinf {
namespace {

using shard::Passes;

enum class Kind : std::uint32_t {
  kPull,    // a slice is wanted, on Lane::kWeights
  kPart,    // of a gradient; its bytes follow
  kClose,   // a pass
  kFailed,  // the reason follows
  kEnd,     // nothing more on any lane
};

// What goes before everything, in the byte order of the machine: all ranks are
// of one kind.
struct Header {
  Kind kind = Kind::kEnd;
  std::uint32_t unit = 0;
  std::uint64_t number = 0;  // the pass, or how many
  std::uint64_t bytes = 0;   // that follow, or are wanted
  // Of the unit, for comparing; the sender's.
  std::uint64_t elements = 0;
  std::uint64_t passes = 0;  // that the sender has closed
  std::uint64_t edits = 0;   // that it has made of the unit
  char name[64] = {};        // the end of a long one
};
static_assert(std::is_trivially_copyable_v<Header>);

std::span<std::byte> bytes_of(Header& header) {
  return std::as_writable_bytes(std::span(&header, 1));
}

std::string_view end_of(std::string_view name) {
  constexpr std::size_t kMost = sizeof(Header::name) - 1;
  return name.substr(name.size() - std::min(name.size(), kMost));
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

}  // namespace

class Exchange::Impl {
 public:
  Impl(std::shared_ptr<Comm> comm, Keeper& keeper)
      : comm_(std::move(comm)),
        keeper_(keeper),
        passes_(comm_->size()),
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
  void edited(std::uint32_t unit);
  std::unique_ptr<Move> push(std::uint32_t unit, std::uint64_t pass,
                             std::span<const std::byte> gradient);
  std::unique_ptr<Move> close_pass(std::uint64_t pass);
  Status finish();
  void fail(const Status& why);
  Status status() const;

 private:
  struct Unit {
    UnitSpec spec;
    Partition partition;
    std::uint64_t edits = 0;
  };
  struct Peer {
    // Of requests and of the receives for their answers; of headers and of what
    // belongs to them.
    Mutex order;
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
  Mutex& order_with(int peer) {
    return peers_[static_cast<std::size_t>(peer)].order;
  }
  Header header_for(Kind kind, std::uint32_t unit, std::uint64_t number) const;
  void send_header(Bundle& bundle, int peer, Lane lane, Header& header);
  void for_others(const std::function<void(int)>& what) const;

  // The threads of a peer.
  void serve_requests(int peer);
  void take_grads(int peer);
  Status serve(int peer, const Header& request);
  Status receive_part(int peer, const Header& header);
  Result<std::string> receive_text(int peer, const Header& header);
  // Waits until this rank has the unit too.
  Status check_unit(int peer, const Header& header);
  // Waits until this rank has made the sender's edits.
  Status wait_for_edits(int peer, const Header& header);

  Status add_part(const PartName& part);
  Status note_close(int rank, std::uint64_t pass, std::size_t num_units);
  Status compare_units_locked(int rank) const ZINF_REQUIRES(mutex_);
  Status note_end(int rank);
  Status hand_over(std::uint64_t pass, const Passes::Complete& complete);
  Status end_pass_if_over(std::uint64_t pass);

  // Without telling others.
  void stop(const Status& why);
  // What has failed behind an error of a transfer: who finds another rank gone
  // may not have read yet what that one said last.
  Status explain(const Status& error);
  std::unique_ptr<Bundle> bundle() {
    return std::make_unique<Bundle>(
        [this](const Status& error) { return explain(error); });
  }

  const std::shared_ptr<Comm> comm_;
  Keeper& keeper_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Unit> units_ ZINF_GUARDED_BY(mutex_);
  Passes passes_ ZINF_GUARDED_BY(mutex_);
  // Of each rank, when it closed its last pass.
  std::vector<std::size_t> num_units_ ZINF_GUARDED_BY(mutex_);
  Status failed_ ZINF_GUARDED_BY(mutex_);
  std::vector<Peer> peers_;
};

Exchange::Impl::~Impl() {
  stop(Status::error(Code::kCancelled, "this rank has ended"));
  for (Peer& peer : peers_) {
    if (peer.requests.joinable()) peer.requests.join();
    if (peer.grads.joinable()) peer.grads.join();
  }
}

Status Exchange::Impl::finish() {
  auto words = bundle();
  Header end = header_for(Kind::kEnd, 0, 0);
  for_others([&](int peer) {
    MutexLock order(order_with(peer));
    send_header(*words, peer, Lane::kRequests, end);
    send_header(*words, peer, Lane::kGrads, end);
  });
  ZINF_TRY(words->wait());
  ZINF_TRY(note_end(comm_->rank()));
  MutexLock lock(mutex_);
  while (failed_.ok() && !passes_.all_left()) changed_.wait(mutex_);
  return failed_;
}

Status Exchange::Impl::start() {
  Status status;
  for_others([&](int peer) {
    Peer& at = peers_[static_cast<std::size_t>(peer)];
    if (status.ok()) {
      status =
          start_thread(at.requests, [this, peer] { serve_requests(peer); });
    }
    if (status.ok()) {
      status = start_thread(at.grads, [this, peer] { take_grads(peer); });
    }
  });
  return status;
}

void Exchange::Impl::for_others(const std::function<void(int)>& what) const {
  for (int i = 1; i < comm_->size(); ++i) {
    what((comm_->rank() + i) % comm_->size());
  }
}

std::uint32_t Exchange::Impl::next_unit() const {
  MutexLock lock(mutex_);
  return static_cast<std::uint32_t>(units_.size());
}

std::uint32_t Exchange::Impl::add(const UnitSpec& spec) {
  MutexLock lock(mutex_);
  units_.push_back({spec, Partition(spec.elements, comm_->size())});
  changed_.notify_all();
  return static_cast<std::uint32_t>(units_.size() - 1);
}

Partition Exchange::Impl::partition(std::uint32_t unit) const {
  MutexLock lock(mutex_);
  return units_.at(unit).partition;
}

Exchange::Impl::Shape Exchange::Impl::shape_of(std::uint32_t unit) const {
  MutexLock lock(mutex_);
  const Unit& about = units_.at(unit);
  return {about.partition, about.spec.element_bytes};
}

void Exchange::Impl::send_header(Bundle& bundle, int peer, Lane lane,
                                 Header& header) {
  bundle.add(comm_->send(peer, lane, bundle.keep(bytes_of(header))));
}

std::span<std::byte> Exchange::Impl::slice_of(const Shape& shape, int rank,
                                              std::span<std::byte> whole) {
  const Slice slice = shape.partition.slice(rank);
  return whole.subspan(slice.begin * shape.element_bytes,
                       slice.size() * shape.element_bytes);
}

Header Exchange::Impl::header_for(Kind kind, std::uint32_t unit,
                                  std::uint64_t number) const {
  MutexLock lock(mutex_);
  Header header{.kind = kind,
                .unit = unit,
                .number = number,
                .passes = passes_.closed(comm_->rank())};
  if (unit < units_.size()) {
    const UnitSpec& spec = units_[unit].spec;
    header.elements = spec.elements;
    header.edits = units_[unit].edits;
    end_of(spec.name).copy(header.name, sizeof(header.name) - 1);
  }
  return header;
}

std::unique_ptr<Move> Exchange::Impl::pull(std::uint32_t unit,
                                           std::uint64_t passes,
                                           std::span<std::byte> into) {
  const Shape shape = shape_of(unit);
  auto moves = bundle();
  Header header = header_for(Kind::kPull, unit, passes);
  for_others([&](int peer) {
    std::span<std::byte> slice = slice_of(shape, peer, into);
    if (slice.empty()) return;
    header.bytes = slice.size();
    MutexLock order(order_with(peer));
    moves->add(comm_->receive(peer, Lane::kWeights, slice));
    send_header(*moves, peer, Lane::kRequests, header);
  });
  return moves;
}

void Exchange::Impl::edited(std::uint32_t unit) {
  MutexLock lock(mutex_);
  ++units_.at(unit).edits;
  changed_.notify_all();
}

Status Exchange::Impl::settled(std::uint32_t unit, std::uint64_t passes) {
  MutexLock lock(mutex_);
  while (failed_.ok() && passes_.settled(unit) < passes) {
    changed_.wait(mutex_);
  }
  return failed_;
}

std::unique_ptr<Move> Exchange::Impl::push(
    std::uint32_t unit, std::uint64_t pass,
    std::span<const std::byte> gradient) {
  const Shape shape = shape_of(unit);
  std::span<std::byte> whole{const_cast<std::byte*>(gradient.data()),
                             gradient.size()};
  auto moves = bundle();
  Header header = header_for(Kind::kPart, unit, pass);
  for_others([&](int peer) {
    std::span<std::byte> slice = slice_of(shape, peer, whole);
    if (slice.empty()) return;
    header.bytes = slice.size();
    MutexLock order(order_with(peer));
    send_header(*moves, peer, Lane::kGrads, header);
    moves->add(comm_->send(peer, Lane::kGrads, slice));
  });
  std::span<std::byte> mine = slice_of(shape, comm_->rank(), whole);
  if (mine.empty()) return moves;
  const PartName part{unit, pass, comm_->rank()};
  Status status;
  if (auto room = keeper_.room(part, mine.size()); room.ok()) {
    std::memcpy(room->bytes.data(), mine.data(), mine.size());
  } else {
    status = room.status();
  }
  if (status.ok()) status = add_part(part);
  if (!status.ok()) fail(status);
  return moves;
}

std::unique_ptr<Move> Exchange::Impl::close_pass(std::uint64_t pass) {
  auto moves = bundle();
  Header header = header_for(Kind::kClose, 0, pass);
  header.unit = next_unit();
  for_others([&](int peer) {
    MutexLock order(order_with(peer));
    send_header(*moves, peer, Lane::kGrads, header);
  });
  Status status = note_close(comm_->rank(), pass, header.unit);
  if (!status.ok()) fail(status);
  return moves;
}

void Exchange::Impl::serve_requests(int peer) {
  while (true) {
    Header header;
    Status status =
        comm_->receive(peer, Lane::kRequests, bytes_of(header))->wait();
    // What is behind an error is the last word on the other lane.
    if (!status.ok() || header.kind == Kind::kEnd) return;
    status = serve(peer, header);
    if (!status.ok()) return fail(explain(status));
  }
}

Result<std::string> Exchange::Impl::receive_text(int peer,
                                                 const Header& header) {
  std::string text(header.bytes, ' ');
  ZINF_TRY(
      comm_
          ->receive(peer, Lane::kGrads, std::as_writable_bytes(std::span(text)))
          ->wait());
  return text;
}

Status Exchange::Impl::serve(int peer, const Header& request) {
  ZINF_TRY(check_unit(peer, request));
  ZINF_TRY(settled(request.unit, request.number));
  ZINF_TRY(wait_for_edits(peer, request));
  ZINF_ASSIGN(Block slice, keeper_.slice(request.unit, request.number));
  ZINF_CHECK(slice.bytes.size() >= request.bytes,
             "unit %u has a slice of %zu bytes, %zu are wanted", request.unit,
             slice.bytes.size(), static_cast<std::size_t>(request.bytes));
  return comm_->send(peer, Lane::kWeights, slice.bytes.first(request.bytes))
      ->wait();
}

Status Exchange::Impl::check_unit(int peer, const Header& header) {
  MutexLock lock(mutex_);
  while (header.unit >= units_.size() && failed_.ok()) {
    if (passes_.closed(comm_->rank()) > header.passes) {
      return Status::error(
          Code::kInvalid,
          strf("rank %d has the parameter \"%s\", rank %d has only %zu "
               "parameters and not this one: all ranks must build the same "
               "model",
               peer, header.name, comm_->rank(), units_.size()));
    }
    changed_.wait(mutex_);
  }
  ZINF_TRY(failed_);
  const UnitSpec& spec = units_[header.unit].spec;
  if (spec.elements == header.elements && end_of(spec.name) == header.name) {
    return {};
  }
  return Status::error(
      Code::kInvalid,
      strf("parameter %u is \"%s\" with %zu elements on rank %d, and \"%s\" "
           "with %zu on rank %d: all ranks must build the same model, in the "
           "same order",
           header.unit, spec.name.c_str(),
           static_cast<std::size_t>(spec.elements), comm_->rank(), header.name,
           static_cast<std::size_t>(header.elements), peer));
}

Status Exchange::Impl::wait_for_edits(int peer, const Header& header) {
  MutexLock lock(mutex_);
  while (units_[header.unit].edits < header.edits && failed_.ok()) {
    if (passes_.closed(comm_->rank()) > header.passes ||
        passes_.left(comm_->rank())) {
      return Status::error(
          Code::kInvalid,
          strf("rank %d has changed \"%s\" %zu times outside of training, rank "
               "%d %zu times: all ranks must make the same changes",
               peer, units_[header.unit].spec.name.c_str(),
               static_cast<std::size_t>(header.edits), comm_->rank(),
               static_cast<std::size_t>(units_[header.unit].edits)));
    }
    changed_.wait(mutex_);
  }
  return failed_;
}

void Exchange::Impl::take_grads(int peer) {
  bool ended = false;  // but it serves on, and may still fail
  while (true) {
    Header header;
    Status status =
        comm_->receive(peer, Lane::kGrads, bytes_of(header))->wait();
    if (!status.ok()) return ended ? void() : stop(status);
    switch (header.kind) {
      case Kind::kPart:
        status = receive_part(peer, header);
        break;
      case Kind::kClose:
        status = note_close(peer, header.number, header.unit);
        break;
      case Kind::kEnd:
        ended = true;
        status = note_end(peer);
        break;
      default: {
        auto why = receive_text(peer, header);
        return stop(why.ok() ? Status::error(Code::kGone, *why) : why.status());
      }
    }
    if (!status.ok()) return fail(status);
  }
}

Status Exchange::Impl::note_end(int rank) {
  MutexLock lock(mutex_);
  changed_.notify_all();
  return passes_.leave(rank);
}

Status Exchange::Impl::receive_part(int peer, const Header& header) {
  ZINF_TRY(check_unit(peer, header));
  const PartName part{header.unit, header.number, peer};
  {
    ZINF_ASSIGN(Block room, keeper_.room(part, header.bytes));
    ZINF_TRY(comm_->receive(peer, Lane::kGrads, room.bytes)->wait());
  }
  return add_part(part);
}

Status Exchange::Impl::add_part(const PartName& part) {
  std::optional<Passes::Complete> complete;
  {
    MutexLock lock(mutex_);
    auto added = passes_.add(part);
    ZINF_TRY(added.status().in(units_[part.unit].spec.name));
    complete = std::move(*added);
  }
  return complete ? hand_over(part.pass, *complete) : Status();
}

Status Exchange::Impl::note_close(int rank, std::uint64_t pass,
                                  std::size_t num_units) {
  std::vector<Passes::Complete> complete;
  {
    MutexLock lock(mutex_);
    num_units_[static_cast<std::size_t>(rank)] = num_units;
    ZINF_ASSIGN(complete, passes_.close(rank, pass));
    changed_.notify_all();
    ZINF_TRY(compare_units_locked(rank));
  }
  for (const Passes::Complete& each : complete) {
    ZINF_TRY(hand_over(pass, each));
  }
  return end_pass_if_over(pass);
}

// With those who have closed the same pass.
Status Exchange::Impl::compare_units_locked(int rank) const {
  const std::size_t count = num_units_[static_cast<std::size_t>(rank)];
  for (int other = 0; other < comm_->size(); ++other) {
    const std::size_t others = num_units_[static_cast<std::size_t>(other)];
    if (passes_.closed(other) != passes_.closed(rank) || others == count) {
      continue;
    }
    return Status::error(
        Code::kInvalid,
        strf("rank %d has %zu parameters, rank %d has %zu: all ranks must "
             "build the same model",
             other, others, rank, count));
  }
  return {};
}

Status Exchange::Impl::hand_over(std::uint64_t pass,
                                 const Passes::Complete& complete) {
  ZINF_TRY(keeper_.take(complete.unit, pass, complete.ranks));
  {
    MutexLock lock(mutex_);
    passes_.taken(complete.unit, pass);
    changed_.notify_all();
  }
  return end_pass_if_over(pass);
}

Status Exchange::Impl::end_pass_if_over(std::uint64_t pass) {
  {
    MutexLock lock(mutex_);
    if (!passes_.end(pass)) return {};
  }
  ZINF_TRY(keeper_.pass_over(pass));
  MutexLock lock(mutex_);
  passes_.settle(pass);
  changed_.notify_all();
  return {};
}

void Exchange::Impl::fail(const Status& why) {
  const std::string text = strf("rank %d of %d failed: %s", comm_->rank(),
                                comm_->size(), why.text().c_str());
  {
    MutexLock lock(mutex_);
    if (!failed_.ok()) return;
    failed_ = why;
    changed_.notify_all();
  }
  Bundle words([](const Status& error) { return error; });
  Header header = header_for(Kind::kFailed, 0, 0);
  header.bytes = text.size();
  for_others([&](int peer) {
    MutexLock order(order_with(peer));
    send_header(words, peer, Lane::kGrads, header);
    words.add(comm_->send(peer, Lane::kGrads,
                          words.keep(std::as_bytes(std::span(text)))));
  });
  // Who does not listen finds this rank gone.
  constexpr auto kPatience = std::chrono::seconds(5);
  const auto begin = std::chrono::steady_clock::now();
  while (!words.done() &&
         std::chrono::steady_clock::now() - begin < kPatience) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  comm_->close(why);
}

void Exchange::Impl::stop(const Status& why) {
  {
    MutexLock lock(mutex_);
    if (!failed_.ok()) return;
    failed_ = why;
    changed_.notify_all();
  }
  comm_->close(why);
}

Status Exchange::Impl::explain(const Status& error) {
  constexpr auto kPatience = std::chrono::seconds(10);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  MutexLock lock(mutex_);
  while (failed_.ok() && error.code() == Code::kGone &&
         std::chrono::steady_clock::now() < end) {
    changed_.wait_for(mutex_, kPatience);
  }
  return failed_.ok() ? error : failed_;
}

Status Exchange::Impl::status() const {
  MutexLock lock(mutex_);
  return failed_;
}

Exchange::Exchange(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Exchange::~Exchange() = default;

Result<std::unique_ptr<Exchange>> Exchange::create(std::shared_ptr<Comm> comm,
                                                   Keeper& keeper) {
  auto impl = std::make_unique<Impl>(std::move(comm), keeper);
  ZINF_TRY(impl->start());
  return std::unique_ptr<Exchange>(new Exchange(std::move(impl)));
}

std::uint32_t Exchange::next_unit() const { return impl_->next_unit(); }
std::uint32_t Exchange::add(const UnitSpec& unit) { return impl_->add(unit); }
std::span<std::byte> Exchange::own_slice(std::uint32_t unit,
                                         std::span<std::byte> whole) const {
  return impl_->own_slice(unit, whole);
}
Partition Exchange::partition(std::uint32_t unit) const {
  return impl_->partition(unit);
}
std::unique_ptr<Move> Exchange::pull(std::uint32_t unit, std::uint64_t passes,
                                     std::span<std::byte> into) {
  return impl_->pull(unit, passes, into);
}
Status Exchange::settled(std::uint32_t unit, std::uint64_t passes) {
  return impl_->settled(unit, passes);
}
std::unique_ptr<Move> Exchange::push(std::uint32_t unit, std::uint64_t pass,
                                     std::span<const std::byte> gradient) {
  return impl_->push(unit, pass, gradient);
}
std::unique_ptr<Move> Exchange::close_pass(std::uint64_t pass) {
  return impl_->close_pass(pass);
}
Status Exchange::finish() { return impl_->finish(); }
void Exchange::edited(std::uint32_t unit) { impl_->edited(unit); }
void Exchange::fail(const Status& why) { impl_->fail(why); }
Status Exchange::status() const { return impl_->status(); }

}  // namespace zinf
