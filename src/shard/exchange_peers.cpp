// The threads that listen to other ranks.
#include <algorithm>
#include <optional>
#include <utility>

#include "src/base/check.h"
#include "src/base/strf.h"
#include "src/shard/exchange_impl.h"

namespace zinf {

using shard::bytes_of;
using shard::Changes;
using shard::end_of;
using shard::Header;
using shard::Kind;
using shard::Passes;

void Exchange::Impl::serve_requests(int peer) {
  while (true) {
    Header header;
    Status status =
        comm_->receive(peer, Lane::kRequests, bytes_of(header))->wait();
    // What is behind an error is the last word on the other lane.
    if (!status.ok() || header.kind == Kind::kEnd) return;
    status = header.kind == Kind::kPulls ? serve_small(peer, header)
                                         : serve(peer, header);
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
  ZINF_ASSIGN(Block slice, wanted_slice(peer, request));
  return comm_->send(peer, Lane::kWeights, slice.bytes.first(request.bytes))
      ->wait();
}

Status Exchange::Impl::serve_small(int peer, const Header& head) {
  std::vector<Header> requests(head.number);
  ZINF_TRY(comm_
               ->receive(peer, Lane::kRequests,
                         std::as_writable_bytes(std::span(requests)))
               ->wait());
  std::vector<std::byte> answer;
  answer.reserve(head.bytes);
  for (const Header& request : requests) {
    ZINF_ASSIGN(Block slice, wanted_slice(peer, request));
    const auto bytes = slice.bytes.first(request.bytes);
    answer.insert(answer.end(), bytes.begin(), bytes.end());
  }
  return comm_->send(peer, Lane::kWeights, answer)->wait();
}

Result<Block> Exchange::Impl::wanted_slice(int peer, const Header& request) {
  ZINF_TRY(check_unit(peer, request));
  ZINF_TRY(settled(request.unit, request.number));
  ZINF_TRY(wait_for_changes(peer, request));
  ZINF_ASSIGN(Block slice, keeper_.slice(request.unit, request.number));
  ZINF_CHECK(slice.bytes.size() >= request.bytes,
             "unit %u has a slice of %zu bytes, %zu are wanted", request.unit,
             slice.bytes.size(), static_cast<std::size_t>(request.bytes));
  return slice;
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
               number(peer), header.name, number(comm_->rank()),
               units_.size()));
    }
    changed_.wait(mutex_);
  }
  ZINF_TRY(failed_);
  const UnitSpec& spec = units_[header.unit].spec;
  if (spec.elements == header.elements &&
      spec.element_bytes == header.element_bytes &&
      end_of(spec.name) == header.name) {
    return {};
  }
  return Status::error(
      Code::kInvalid,
      strf("parameter %u is \"%s\" with %zu elements of %u bytes on rank %d, "
           "and \"%s\" with %zu of %u on rank %d: all ranks must build the "
           "same model, in the same order",
           header.unit, spec.name.c_str(),
           static_cast<std::size_t>(spec.elements), spec.element_bytes,
           number(comm_->rank()), header.name,
           static_cast<std::size_t>(header.elements),
           static_cast<unsigned>(header.element_bytes), number(peer)));
}

Status Exchange::Impl::wait_for_changes(int peer, const Header& header) {
  MutexLock lock(mutex_);
  while (units_[header.unit].changes < header.changes && failed_.ok()) {
    const bool announced = changes_.announced(header.unit) >= header.changes;
    if (!announced && (passes_.closed(comm_->rank()) > header.passes ||
                       passes_.left(comm_->rank()))) {
      return Status::error(
          Code::kInvalid,
          strf("rank %d has changed \"%s\" outside of training, rank %d has "
               "not: all ranks must build the same model and "
               "make the same changes",
               number(peer), units_[header.unit].spec.name.c_str(),
               number(comm_->rank())));
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
    if (!this->status().ok()) {
      if (!discard(peer, header)) return;
      continue;
    }
    switch (header.kind) {
      case Kind::kPart:
        status = receive_part(peer, header);
        if (!status.ok()) return fail(status);  // its bytes may still come
        status = add_part({header.unit, header.number, peer});
        break;
      case Kind::kClose:
        status = receive_close(peer, header);
        break;
      case Kind::kChange:
        status = note_change(peer, header);
        break;
      case Kind::kContent: {
        MutexLock lock(mutex_);
        changes_.made(peer, header.unit, header.number);
        break;
      }
      case Kind::kEnd:
        ended = true;
        status = note_end(peer);
        break;
      default: {
        auto why = receive_text(peer, header);
        return stop(why.ok() ? Status::error(Code::kGone, *why) : why.status());
      }
    }
    if (!status.ok()) fail_and_listen(status);
  }
}

bool Exchange::Impl::discard(int peer, const Header& header) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{64} << 20;
  if (header.bytes > kMostBytes) return false;
  if (header.kind == Kind::kFailed)
    peers_[static_cast<std::size_t>(peer)].has_failed = true;
  std::vector<std::byte> content(header.bytes);
  return content.empty() ||
         comm_->receive(peer, Lane::kGrads, content)->wait().ok();
}

Status Exchange::Impl::note_end(int rank) {
  {
    MutexLock lock(mutex_);
    changed_.notify_all();
    changes_.leave(rank);
    ZINF_TRY(passes_.leave(rank));
  }
  return make_changes();
}

Status Exchange::Impl::receive_part(int peer, const Header& header) {
  ZINF_TRY(check_unit(peer, header));
  ZINF_ASSIGN(Block room,
              keeper_.room({header.unit, header.number, peer}, header.bytes));
  return comm_->receive(peer, Lane::kGrads, room.bytes)->wait();
}

Status Exchange::Impl::add_part(const PartName& part) {
  std::optional<Passes::Complete> complete;
  {
    MutexLock lock(mutex_);
    ZINF_TRY(begin_pass_locked(part.rank, part.pass));
    auto added = passes_.add(part);
    ZINF_TRY(added.status().in(units_[part.unit].spec.name));
    complete = std::move(*added);
  }
  return complete ? hand_over(part.pass, *complete) : Status();
}

Status Exchange::Impl::receive_close(int peer, const Header& header) {
  Close close{
      .pass = header.number, .num_units = header.unit, .what = header.name};
  if (header.bytes > 0) {
    close.units.resize(header.bytes / sizeof(std::uint32_t));
    ZINF_TRY(comm_
                 ->receive(peer, Lane::kGrads,
                           std::as_writable_bytes(std::span(close.units)))
                 ->wait());
  }
  return note_close(peer, close);
}

Status Exchange::Impl::note_close(int rank, const Close& close) {
  std::vector<Passes::Complete> complete;
  {
    MutexLock lock(mutex_);
    num_units_[static_cast<std::size_t>(rank)] = close.num_units;
    ZINF_TRY(compare_closes_locked(rank, close));
    ZINF_TRY(begin_pass_locked(rank, close.pass));
    ZINF_ASSIGN(complete, passes_.close(rank, close.pass));
    changed_.notify_all();
    ZINF_TRY(compare_units_locked(rank));
  }
  for (const Passes::Complete& each : complete) {
    ZINF_TRY(hand_over(close.pass, each));
  }
  return end_pass_if_over(close.pass);
}

Status Exchange::Impl::compare_closes_locked(int rank, const Close& close) {
  Open& open = open_[close.pass];
  if (open.who < 0) {
    open.who = rank;
    open.what = close.what;
  }
  open.units.insert(close.units.begin(), close.units.end());
  if (open.what != close.what) {
    return Status::error(
        Code::kInvalid,
        strf("rank %d has ended %s where rank %d has ended %s: all ranks must "
             "make the same backward passes and steps, with the same options",
             number(open.who), open.what.c_str(), number(rank),
             close.what.c_str()));
  }
  const Changes::Waiting* missed = changes_.missed_by(rank, close.pass + 1);
  if (rank == comm_->rank() || missed == nullptr) return {};
  return Status::error(
      Code::kInvalid,
      strf("rank %d has changed \"%s\" outside of training, rank %d has not: "
           "all ranks must build the same model and "
           "make the same changes",
           number(comm_->rank()), units_.at(missed->unit).spec.name.c_str(),
           number(rank)));
}

Status Exchange::Impl::begin_pass_locked(int rank, std::uint64_t pass) {
  auto& begun = begun_[static_cast<std::size_t>(rank)];
  begun = std::max(begun, pass + 1);
  const int own = comm_->rank();
  for (int other = 0; other < comm_->size(); ++other) {
    const std::uint64_t both =
        std::min(begun_[static_cast<std::size_t>(own)],
                 begun_[static_cast<std::size_t>(other)]);
    if (other == own || (rank != own && rank != other) || both <= pass)
      continue;
    if (const auto unit = changes_.different(other)) {
      return Status::error(
          Code::kInvalid,
          strf("rank %d and rank %d have changed \"%s\" outside of training to "
               "different values: all ranks must make the same changes",
               number(std::min(own, other)), number(std::max(own, other)),
               units_.at(*unit).spec.name.c_str()));
    }
  }
  return {};
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
             number(other), others, number(rank), count));
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

}  // namespace zinf
