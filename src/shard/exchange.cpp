#include "zinf/exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "src/base/start_thread.h"
#include "src/base/strf.h"
#include "src/shard/exchange_impl.h"

namespace zinf {

using shard::Bundle;
using shard::bytes_of;
using shard::Changes;
using shard::end_of;
using shard::Header;
using shard::Kind;
using shard::SmallPull;
using shard::SmallPulls;

Exchange::Impl::~Impl() {
  stop(Status::error(Code::kCancelled, "this rank has ended"));
  for (Peer& peer : peers_) {
    if (peer.requests.joinable()) peer.requests.join();
    if (peer.grads.joinable()) peer.grads.join();
  }
  if (teller_.joinable()) teller_.join();
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
    header.element_bytes = spec.element_bytes;
    header.changes = changes_.announced(unit);
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
    if (slice.size() <= SmallPulls::kSliceBytes) {
      return add_small(*moves, peer, header, slice);
    }
    ask_for_small(peer, nullptr);
    MutexLock order(order_with(peer));
    moves->add(comm_->receive(peer, Lane::kWeights, slice));
    send_header(*moves, peer, Lane::kRequests, header);
  });
  return moves;
}

void Exchange::Impl::add_small(Bundle& bundle, int peer, const Header& request,
                               std::span<std::byte> into) {
  Peer& at = peers_[static_cast<std::size_t>(peer)];
  std::shared_ptr<SmallPulls> small;
  {
    MutexLock order(at.order);
    if (at.small == nullptr) at.small = std::make_shared<SmallPulls>();
    small = at.small;
    small->add(request, into);
  }
  if (small->full()) ask_for_small(peer, small);
  bundle.add(std::make_unique<SmallPull>(
      small, [this, peer, small] { ask_for_small(peer, small); }));
}

// These, unless they are asked for already; null: whatever waits.
void Exchange::Impl::ask_for_small(int peer,
                                   const std::shared_ptr<SmallPulls>& small) {
  Peer& at = peers_[static_cast<std::size_t>(peer)];
  MutexLock order(at.order);
  if (at.small == nullptr || (small != nullptr && at.small != small)) return;
  std::exchange(at.small, nullptr)->send(*comm_, peer);
}

void Exchange::Impl::announce_change(std::uint32_t unit) {
  std::uint64_t number = 0;
  {
    MutexLock lock(mutex_);
    number = changes_.announce(unit);
  }
  tell_others(header_for(Kind::kChange, unit, number));
}

void Exchange::Impl::note_content(std::uint32_t unit, std::uint64_t hash) {
  {
    MutexLock lock(mutex_);
    changes_.made(comm_->rank(), unit, hash);
  }
  tell_others(header_for(Kind::kContent, unit, hash));
}

std::vector<std::uint64_t> Exchange::Impl::contents() const {
  MutexLock lock(mutex_);
  std::vector<std::uint64_t> all = changes_.contents();
  all.resize(units_.size());
  return all;
}

void Exchange::Impl::tell_others(Header header) {
  auto words = bundle();
  for_others([&](int peer) {
    MutexLock order(order_with(peer));
    send_header(*words, peer, Lane::kGrads, header);
  });
  std::vector<std::unique_ptr<Bundle>> over;  // ends without the lock
  MutexLock lock(mutex_);
  while (!announcements_.empty() && announcements_.front()->done()) {
    over.push_back(std::move(announcements_.front()));
    announcements_.pop_front();
  }
  announcements_.push_back(std::move(words));
}

std::unique_ptr<Move> Exchange::Impl::change(std::uint32_t unit,
                                             std::function<Status()> make) {
  return std::make_unique<shard::PendingMove>(
      add_change(unit, std::move(make)));
}

std::shared_ptr<shard::Pending> Exchange::Impl::add_change(
    std::uint32_t unit, std::function<Status()> make) {
  auto pending = std::make_shared<shard::Pending>();
  {
    MutexLock lock(mutex_);
    if (!failed_.ok()) {
      pending->finish(failed_);
      return pending;
    }
    changes_.add({unit, changes_.announced(unit), passes_.closed(comm_->rank()),
                  std::move(make), pending});
  }
  Status status = make_changes();
  if (!status.ok()) fail(status);
  return pending;
}

Status Exchange::Impl::make_changes() {
  std::vector<Changes::Waiting> ready;
  {
    MutexLock lock(mutex_);
    ready = changes_.take_ready();
  }
  Status first;
  for (Changes::Waiting& each : ready) {
    Status status = each.make();
    {
      MutexLock lock(mutex_);
      units_.at(each.unit).changes = each.number;
      changed_.notify_all();
    }
    if (first.ok()) first = status;
    each.pending->finish(std::move(status));
  }
  return first;
}

Status Exchange::Impl::note_change(int peer, const Header& header) {
  {
    MutexLock lock(mutex_);
    changes_.heard(peer, header.unit, header.number);
  }
  return make_changes();
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
  {
    MutexLock lock(mutex_);
    open_[pass].units.insert(unit);
  }
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

std::unique_ptr<Move> Exchange::Impl::close_pass(std::uint64_t pass,
                                                 std::string_view what) {
  auto moves = bundle();
  Close close{
      .pass = pass, .num_units = next_unit(), .what = std::string(what)};
  {
    MutexLock lock(mutex_);
    const auto& units = open_[pass].units;  // others' that have closed it too
    close.units.assign(units.begin(), units.end());
  }
  Header header = header_for(Kind::kClose, 0, pass);
  header.unit = static_cast<std::uint32_t>(close.num_units);
  header.bytes = close.units.size() * sizeof(std::uint32_t);
  std::memset(header.name, 0, sizeof(header.name));
  what.copy(header.name, sizeof(header.name) - 1);
  for_others([&](int peer) {
    MutexLock order(order_with(peer));
    send_header(*moves, peer, Lane::kGrads, header);
    if (close.units.empty()) return;
    moves->add(comm_->send(
        peer, Lane::kGrads,
        moves->keep(std::as_bytes(std::span(std::as_const(close.units))))));
  });
  Status status = note_close(comm_->rank(), close);
  if (!status.ok()) fail(status);
  return moves;
}

Result<std::vector<std::uint32_t>> Exchange::Impl::wait_closed(
    std::uint64_t pass) {
  MutexLock lock(mutex_);
  for (int rank = 0; rank < comm_->size(); ++rank) {
    while (failed_.ok() && passes_.closed(rank) <= pass) changed_.wait(mutex_);
  }
  ZINF_TRY(failed_);
  const std::set<std::uint32_t>& units = open_[pass].units;
  std::vector<std::uint32_t> all(units.begin(), units.end());
  open_.erase(pass);
  return all;
}

Result<std::vector<int>> Exchange::Impl::missing(
    std::uint64_t pass, std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  MutexLock lock(mutex_);
  while (true) {
    ZINF_TRY(failed_);
    std::vector<int> ranks;
    for (int rank = 0; rank < comm_->size(); ++rank) {
      if (passes_.closed(rank) <= pass) ranks.push_back(number(rank));
    }
    const auto now = std::chrono::steady_clock::now();
    if (ranks.empty() || now >= end) return ranks;
    changed_.wait_for(mutex_, end - now);
  }
}

bool Exchange::Impl::set_failed(const Status& why) {
  std::vector<Changes::Waiting> waiting;
  {
    MutexLock lock(mutex_);
    if (!failed_.ok()) return false;
    failed_ = why;
    waiting = changes_.take_all();
    changed_.notify_all();
  }
  for (Changes::Waiting& each : waiting) each.pending->finish(why);
  return true;
}

void Exchange::Impl::fail(const Status& why) {
  if (set_failed(why)) tell_failure(why);
}

void Exchange::Impl::fail_and_listen(const Status& why) {
  if (!set_failed(why)) return;
  Status started = start_thread(teller_, [this, why] { tell_failure(why); });
  if (!started.ok()) comm_->close(why);
}

void Exchange::Impl::tell_failure(const Status& why) {
  const std::string text =
      strf("rank %d of %d failed: %s", number(comm_->rank()), comm_->total(),
           why.text().c_str());
  Header header = header_for(Kind::kFailed, 0, 0);
  header.bytes = text.size();
  std::map<int, std::unique_ptr<Bundle>> words;  // by peer
  for_others([&](int peer) {
    auto& to = words[peer] =
        std::make_unique<Bundle>([](const Status& error) { return error; });
    MutexLock order(order_with(peer));
    send_header(*to, peer, Lane::kGrads, header);
    to->add(comm_->send(peer, Lane::kGrads,
                        to->keep(std::as_bytes(std::span(text)))));
  });
  const auto is_told = [&](const auto& word) {
    return word.second->done() ||
           peers_[static_cast<std::size_t>(word.first)].has_failed;
  };
  // Who does not listen finds this rank gone.
  constexpr auto kPatience = std::chrono::seconds(5);
  const auto begin = std::chrono::steady_clock::now();
  while (!std::ranges::all_of(words, is_told) &&
         std::chrono::steady_clock::now() - begin < kPatience) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  comm_->close(why);
}

void Exchange::Impl::stop(const Status& why) {
  if (set_failed(why)) comm_->close(why);
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
std::unique_ptr<Move> Exchange::close_pass(std::uint64_t pass,
                                           std::string_view what) {
  return impl_->close_pass(pass, what);
}
Result<std::vector<std::uint32_t>> Exchange::wait_closed(std::uint64_t pass) {
  return impl_->wait_closed(pass);
}
Result<std::vector<int>> Exchange::missing(std::uint64_t pass,
                                           std::chrono::milliseconds patience) {
  return impl_->missing(pass, patience);
}
void Exchange::announce_change(std::uint32_t unit) {
  impl_->announce_change(unit);
}
void Exchange::note_content(std::uint32_t unit, std::uint64_t hash) {
  impl_->note_content(unit, hash);
}
std::vector<std::uint64_t> Exchange::contents() const {
  return impl_->contents();
}
std::unique_ptr<Move> Exchange::change(std::uint32_t unit,
                                       std::function<Status()> make) {
  return impl_->change(unit, std::move(make));
}
void Exchange::change_later(std::uint32_t unit, std::function<Status()> make) {
  impl_->change_later(unit, std::move(make));
}
Status Exchange::finish() { return impl_->finish(); }
void Exchange::fail(const Status& why) { impl_->fail(why); }
Status Exchange::status() const { return impl_->status(); }

}  // namespace zinf
