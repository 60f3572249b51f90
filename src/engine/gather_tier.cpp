#include "zinf/gather_tier.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "src/base/mutex.h"
#include "src/base/strf.h"
#include "src/tier/checksum.h"
#include "zinf/trace_book.h"

namespace zinf {

// Who only evaluates has no steps: then so many uses are one.
constexpr std::size_t kMostPositions = std::size_t{1} << 16;

// Below the wholes are the units of the exchange, by their numbers.
class GatherTier::Impl final : public Keeper, public Backing {
 public:
  Impl(HostTier& host, GatherTierOptions options)
      : host_(host), options_(std::move(options)) {}

  Status start(std::shared_ptr<Comm> comm);

  std::uint32_t add_unit(const UnitSpec& spec, std::optional<StateRef> slice);
  Result<Split> open(std::uint32_t unit, Content content, void* owner);
  // None: it is empty.
  std::optional<StateRef> slice_of(std::uint32_t unit) const {
    MutexLock lock(mutex_);
    return units_.at(unit).slice;
  }
  Status settle(std::uint32_t unit, std::uint64_t passes) const {
    return options_.settle ? options_.settle(unit, passes) : Status();
  }
  // A state of the host's tier, pinned.
  Result<Block> held(StateRef state, Use use);
  // This rank's slice, copied to its place in the whole.
  Status copy_in(std::uint32_t unit, std::span<std::byte> whole);
  Status gather(std::uint32_t unit, std::span<std::byte> whole);
  Status keep(std::uint32_t unit, std::span<const std::byte> whole);
  void drop(std::uint32_t unit);

  void announce(std::span<const StateUse> at_once);
  void end_step();
  void end_step_locked() ZINF_REQUIRES(ahead_mutex_);
  // The first wholes of what is expected next.
  std::vector<StateRef> next_locked() ZINF_REQUIRES(ahead_mutex_);

  // Keeper.
  Result<Block> slice(std::uint32_t unit, std::uint64_t passes) override;
  Result<Block> room(const PartName& part, std::size_t bytes) override;
  Status take(std::uint32_t unit, std::uint64_t pass,
              const std::vector<int>& ranks) override;
  Status pass_over(std::uint64_t pass) override {
    return options_.pass_over ? options_.pass_over(pass) : Status();
  }

  // Backing.
  Result<std::uint32_t> add(const StateSpec&) override { return opening_; }
  Status remove(std::uint32_t) override { return {}; }
  Status discard(std::uint32_t) override { return {}; }
  bool has_content(std::uint32_t) const override {
    return opening_has_content_;
  }
  std::unique_ptr<Move> read(std::uint32_t unit,
                             std::span<std::byte> into) override;
  std::unique_ptr<Move> write(std::uint32_t unit,
                              std::span<const std::byte> from) override;
  bool due(std::uint64_t) const override { return false; }
  Status commit(std::uint64_t) override { return {}; }
  Status rollback() override { return {}; }

  HostTier& host_;
  const GatherTierOptions options_;
  std::atomic<std::uint64_t> passes_ = 0;
  std::unique_ptr<Exchange> exchange_;

  struct Unit {
    std::string name;
    std::uint64_t bytes = 0;  // of the whole
    std::optional<StateRef> slice = {};
    // What it begins with may be memory that nobody has filled yet.
    bool is_new = false;
  };
  mutable Mutex mutex_;
  std::map<std::uint32_t, Unit> units_ ZINF_GUARDED_BY(mutex_);
  std::map<PartName, StateRef> parts_ ZINF_GUARDED_BY(mutex_);

  // The unit whose whole is added to the residency now.
  Mutex opening_mutex_;
  std::uint32_t opening_ = 0;
  bool opening_has_content_ = false;

  Mutex ahead_mutex_;
  TraceBook book_ ZINF_GUARDED_BY(ahead_mutex_);
  std::map<std::uint32_t, std::uint64_t> bytes_ ZINF_GUARDED_BY(ahead_mutex_);
  std::uint64_t now_ ZINF_GUARDED_BY(ahead_mutex_) = 0;
  std::size_t positions_ ZINF_GUARDED_BY(ahead_mutex_) = 0;  // of this step

  std::unique_ptr<Residency> residency_;
  std::shared_ptr<void> giver_;
};

namespace {

// The others' slices are on their way from the start; this rank's is copied by
// whoever waits.
class Gather final : public Move {
 public:
  Gather(std::unique_ptr<Move> others, std::function<Status()> copy_own)
      : others_(std::move(others)), copy_own_(std::move(copy_own)) {}
  ~Gather() override { (void)wait(); }

  bool done() override {
    MutexLock lock(mutex_);
    return done_;
  }
  Status wait() override {
    MutexLock lock(mutex_);
    if (!done_) {
      outcome_ = copy_own_();
      Status others = others_->wait();
      if (outcome_.ok()) outcome_ = others;
      done_ = true;
    }
    return outcome_;
  }

 private:
  Mutex mutex_;
  const std::unique_ptr<Move> others_;
  const std::function<Status()> copy_own_;
  bool done_ ZINF_GUARDED_BY(mutex_) = false;
  Status outcome_ ZINF_GUARDED_BY(mutex_);
};

}  // namespace

Status GatherTier::Impl::start(std::shared_ptr<Comm> comm) {
  HostMemory& memory = host_.memory();
  residency_ = std::make_unique<Residency>(ResidencyOptions{
      .allocate = memory.slabs(),
      .backing = {std::shared_ptr<void>(), this},  // it outlives the residency
      .leaving = options_.leaving,
      .others =
          [&memory](std::uint64_t bytes) {
            return memory.make_room(bytes) > 0;
          },
      .away_limit_bytes = options_.away_bytes});
  giver_ = memory.add_giver(
      // Nobody waits here for another rank: who asks may have to serve it.
      [this](std::uint64_t bytes) { return residency_->drop_idle(bytes); });
  ZINF_ASSIGN(exchange_, Exchange::create(std::move(comm), *this));
  return {};
}

Status GatherTier::Impl::copy_in(std::uint32_t unit,
                                 std::span<std::byte> whole) {
  const std::optional<StateRef> slice = slice_of(unit);
  if (!slice) return {};
  const std::uint64_t passes = passes_;
  ZINF_TRY(exchange_->settled(unit, passes));
  ZINF_TRY(settle(unit, passes));
  ZINF_ASSIGN(Pin pin, host_.residency().pin(*slice, Use::kRead));
  std::span<std::byte> into = exchange_->own_slice(unit, whole);
  std::memcpy(into.data(), pin.bytes().data(), into.size());
  return {};
}

Result<Block> GatherTier::Impl::slice(std::uint32_t unit,
                                      std::uint64_t passes) {
  ZINF_TRY(settle(unit, passes));
  const std::optional<StateRef> slice = slice_of(unit);
  if (!slice) {
    MutexLock lock(mutex_);
    return Status::error(Code::kInvalid,
                         units_.at(unit).name + " has no content any more");
  }
  return held(*slice, Use::kRead);
}

Result<Block> GatherTier::Impl::held(StateRef state, Use use) {
  ZINF_ASSIGN(Pin pin, host_.residency().pin(state, use));
  auto owner = std::make_shared<Pin>(std::move(pin));
  return Block{owner->bytes(), owner};
}

// A state of its own: what waits for others may leave memory.
Result<Block> GatherTier::Impl::room(const PartName& part, std::size_t bytes) {
  const std::string unit = [&] {
    MutexLock lock(mutex_);
    return units_.at(part.unit).name;
  }();
  const std::string name = strf("%s, part of rank %d in pass %zu", unit.c_str(),
                                part.rank, static_cast<std::size_t>(part.pass));
  ZINF_ASSIGN(StateRef state, host_.add({.unit = name,
                                         .state = "grad",
                                         .dtype = "bytes",
                                         .shape = {bytes},
                                         .bytes = bytes},
                                        Role::kGrad, nullptr));
  {
    MutexLock lock(mutex_);
    parts_[part] = state;
  }
  return held(state, Use::kReplace);
}

Status GatherTier::Impl::take(std::uint32_t unit, std::uint64_t pass,
                              const std::vector<int>& ranks) {
  for (int rank : ranks) {
    const PartName part{unit, pass, rank};
    const StateRef state = [&] {
      MutexLock lock(mutex_);
      StateRef found = parts_.at(part);
      parts_.erase(part);
      return found;
    }();
    {
      ZINF_ASSIGN(Pin pin, host_.residency().pin(state, Use::kRead));
      ZINF_TRY(options_.add_part(part, pin.bytes()));
    }
    host_.residency().remove(state);
  }
  return options_.taken ? options_.taken(unit, pass) : Status();
}

std::unique_ptr<Move> GatherTier::Impl::read(std::uint32_t unit,
                                             std::span<std::byte> into) {
  if (auto slice = slice_of(unit)) host_.residency().prefetch(*slice);
  return std::make_unique<Gather>(
      exchange_->pull(unit, passes_, into),
      [this, unit, into] { return copy_in(unit, into); });
}

std::unique_ptr<Move> GatherTier::Impl::write(std::uint32_t unit,
                                              std::span<const std::byte> from) {
  bool compared = true;
  {
    MutexLock lock(mutex_);
    compared = !std::exchange(units_.at(unit).is_new, false);
  }
  if (compared) exchange_->note_content(unit, tier::checksum(from));
  return exchange_->change(unit,
                           [this, unit, from] { return keep(unit, from); });
}

Status GatherTier::Impl::keep(std::uint32_t unit,
                              std::span<const std::byte> whole) {
  std::span<std::byte> mine = exchange_->own_slice(
      unit, {const_cast<std::byte*>(whole.data()), whole.size()});
  if (mine.empty()) return {};
  if (options_.keep) return options_.keep(unit, mine);
  ZINF_ASSIGN(Pin pin,
              host_.residency().pin(slice_of(unit).value(), Use::kReplace));
  std::memcpy(pin.bytes().data(), mine.data(), mine.size());
  return {};
}

Status GatherTier::Impl::gather(std::uint32_t unit,
                                std::span<std::byte> whole) {
  auto others = exchange_->pull(unit, passes_, whole);
  ZINF_TRY(copy_in(unit, whole));
  return others->wait();
}

std::uint32_t GatherTier::Impl::add_unit(const UnitSpec& spec,
                                         std::optional<StateRef> slice) {
  MutexLock lock(mutex_);
  const std::uint32_t unit = exchange_->next_unit();
  units_[unit] = {spec.name, spec.elements * spec.element_bytes, slice};
  exchange_->add(spec);  // from here on others may ask for it
  return unit;
}

Result<GatherTier::Split> GatherTier::Impl::open(std::uint32_t unit,
                                                 Content content, void* owner) {
  StateSpec spec;
  {
    MutexLock lock(mutex_);
    Unit& about = units_.at(unit);
    about.is_new = content == Content::kNone;
    spec = {.unit = about.name,
            .state = "whole",
            .dtype = "bytes",
            .shape = {about.bytes},
            .bytes = about.bytes};
  }
  MutexLock lock(opening_mutex_);
  opening_ = unit;
  opening_has_content_ = content == Content::kInSlices;
  ZINF_ASSIGN(StateRef whole,
              residency_->add(spec, options_.home, owner, Worth::kLow));
  MutexLock ahead(ahead_mutex_);
  bytes_[whole.index] = spec.bytes;
  return Split{unit, whole};
}

void GatherTier::Impl::drop(std::uint32_t unit) {
  exchange_->announce_change(unit);
  exchange_->change_later(unit, [this, unit] {
    {
      MutexLock lock(mutex_);
      units_.at(unit).slice.reset();
    }
    if (options_.dropped) options_.dropped(unit);
    return Status();
  });
}

void GatherTier::Impl::announce(std::span<const StateUse> at_once) {
  std::vector<StateRef> next;
  {
    MutexLock lock(ahead_mutex_);
    book_.use(at_once);
    ++now_;
    if (++positions_ == kMostPositions) end_step_locked();
    // After the last use of a step come an update and end_step().
    if (book_.position() > 0) next = next_locked();
  }
  for (StateRef state : next) residency_->prefetch(state);
}

void GatherTier::Impl::end_step() {
  std::vector<StateRef> next;
  {
    MutexLock lock(ahead_mutex_);
    end_step_locked();
    next = next_locked();
  }
  for (StateRef state : next) residency_->prefetch(state);
}

void GatherTier::Impl::end_step_locked() {
  book_.end_step();
  positions_ = 0;
}

// Not beyond the end of the step: there, slices are new.
std::vector<StateRef> GatherTier::Impl::next_locked() {
  constexpr std::size_t kPositions = 16;
  std::vector<StateRef> next;
  const Trace* trace = book_.trace();
  if (trace == nullptr || options_.ahead_bytes == 0) return next;
  std::uint64_t bytes = 0;
  const std::size_t end =
      std::min(trace->size(), book_.position() + kPositions);
  for (std::size_t at = book_.position(); at < end; ++at) {
    for (const StateUse& use : trace->at(at)) {
      if (use.kind != UseKind::kRead) continue;
      bytes += bytes_[use.state];
      if (bytes > options_.ahead_bytes && !next.empty()) return next;
      residency_->expect({use.state}, now_, now_ + 1 + at - book_.position());
      next.push_back({use.state});
    }
  }
  return next;
}

GatherTier::GatherTier(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

// Moves end before the exchange, and others' requests before what they ask for.
GatherTier::~GatherTier() {
  impl_->giver_.reset();
  impl_->residency_.reset();
  impl_->exchange_.reset();
}

Result<std::unique_ptr<GatherTier>> GatherTier::create(
    HostTier& host, std::shared_ptr<Comm> comm, GatherTierOptions options) {
  auto impl = std::make_unique<Impl>(host, std::move(options));
  ZINF_TRY(impl->start(std::move(comm)));
  return std::unique_ptr<GatherTier>(new GatherTier(std::move(impl)));
}

Status GatherTier::finish() { return impl_->exchange_->finish(); }

std::uint32_t GatherTier::add(const UnitSpec& spec,
                              std::optional<StateRef> slice) {
  return impl_->add_unit(spec, slice);
}

void GatherTier::set_slice(std::uint32_t unit, StateRef slice) {
  MutexLock lock(impl_->mutex_);
  impl_->units_.at(unit).slice = slice;
}

void GatherTier::drop(std::uint32_t unit) { impl_->drop(unit); }

Result<GatherTier::Split> GatherTier::open(std::uint32_t unit, Content content,
                                           void* owner) {
  return impl_->open(unit, content, owner);
}

void GatherTier::close(const Split& split) {
  impl_->residency_->remove(split.whole);
}

void GatherTier::set_passes(std::uint64_t passes) { impl_->passes_ = passes; }
std::uint64_t GatherTier::passes() const { return impl_->passes_; }

Status GatherTier::outdate(const Split& split) {
  Residency& residency = *impl_->residency_;
  residency.evict(split.whole);
  if (residency.place(split.whole) == Place::kAbsent) return {};
  ZINF_ASSIGN(Pin pin, residency.pin(split.whole, Use::kRead));
  return impl_->gather(split.unit, pin.bytes());
}

void GatherTier::announce(std::span<const StateUse> at_once) {
  impl_->announce(at_once);
}
void GatherTier::end_step() { impl_->end_step(); }

Residency& GatherTier::residency() { return *impl_->residency_; }
Exchange& GatherTier::exchange() { return *impl_->exchange_; }

}  // namespace zinf
