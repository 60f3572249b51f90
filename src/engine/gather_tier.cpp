#include "zinf/gather_tier.h"

#include <atomic>
#include <cstring>
#include <map>
#include <utility>

#include "src/base/mutex.h"
#include "src/base/strf.h"

namespace zinf {

// Below the wholes are the units of the exchange, by their numbers.
class GatherTier::Impl final : public Keeper, public Backing {
 public:
  Impl(HostTier& host, GatherTierOptions options)
      : host_(host), options_(std::move(options)) {}

  Status start(std::shared_ptr<Comm> comm);

  Result<Split> add_unit(const UnitSpec& spec, StateRef slice, void* owner);
  StateRef slice_of(std::uint32_t unit) const {
    MutexLock lock(mutex_);
    return units_.at(unit).slice;
  }
  Status settle(std::uint32_t unit) const {
    return options_.settle ? options_.settle(unit) : Status();
  }
  // A state of the host's tier, pinned.
  Result<Block> held(StateRef state, Use use);
  // This rank's slice, copied to its place in the whole.
  Status copy_in(std::uint32_t unit, std::span<std::byte> whole);
  Status gather(std::uint32_t unit, std::span<std::byte> whole);

  // Keeper.
  Result<Block> slice(std::uint32_t unit, std::uint64_t passes) override;
  Result<Block> room(const PartName& part, std::size_t bytes) override;
  Status take(std::uint32_t unit, std::uint64_t pass,
              const std::vector<int>& ranks) override;
  Status pass_over(std::uint64_t pass) override {
    return options_.pass_over ? options_.pass_over(pass) : Status();
  }

  // Backing.
  Result<std::uint32_t> add(const StateSpec&) override {
    return exchange_->next_unit();
  }
  Status remove(std::uint32_t unit) override;
  Status discard(std::uint32_t) override { return {}; }
  bool has_content(std::uint32_t unit) const override;
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
    StateRef slice;
  };
  mutable Mutex mutex_;
  std::map<std::uint32_t, Unit> units_ ZINF_GUARDED_BY(mutex_);
  std::map<PartName, StateRef> parts_ ZINF_GUARDED_BY(mutex_);

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
      .others = [&memory](std::uint64_t bytes) {
        return memory.make_room(bytes) > 0;
      }});
  giver_ = memory.add_giver(
      [this](std::uint64_t bytes) { return residency_->make_room(bytes); });
  ZINF_ASSIGN(exchange_, Exchange::create(std::move(comm), *this));
  return {};
}

Status GatherTier::Impl::copy_in(std::uint32_t unit,
                                 std::span<std::byte> whole) {
  ZINF_TRY(exchange_->settled(unit, passes_));
  ZINF_TRY(settle(unit));
  ZINF_ASSIGN(Pin pin, host_.residency().pin(slice_of(unit), Use::kRead));
  std::span<std::byte> into = exchange_->own_slice(unit, whole);
  std::memcpy(into.data(), pin.bytes().data(), into.size());
  return {};
}

Result<Block> GatherTier::Impl::slice(std::uint32_t unit, std::uint64_t) {
  ZINF_TRY(settle(unit));
  return held(slice_of(unit), Use::kRead);
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

Status GatherTier::Impl::remove(std::uint32_t unit) {
  MutexLock lock(mutex_);
  units_.erase(unit);
  return {};
}

bool GatherTier::Impl::has_content(std::uint32_t unit) const {
  return host_.residency().place(slice_of(unit)) != Place::kEmpty;
}

std::unique_ptr<Move> GatherTier::Impl::read(std::uint32_t unit,
                                             std::span<std::byte> into) {
  host_.residency().prefetch(slice_of(unit));
  return std::make_unique<Gather>(
      exchange_->pull(unit, passes_, into),
      [this, unit, into] { return copy_in(unit, into); });
}

std::unique_ptr<Move> GatherTier::Impl::write(std::uint32_t unit,
                                              std::span<const std::byte> from) {
  Result<Pin> pin = host_.residency().pin(slice_of(unit), Use::kReplace);
  if (!pin.ok()) return finished_move(pin.status());
  std::span<std::byte> whole{const_cast<std::byte*>(from.data()), from.size()};
  std::span<std::byte> mine = exchange_->own_slice(unit, whole);
  std::memcpy(pin->bytes().data(), mine.data(), mine.size());
  exchange_->edited(unit);
  return finished_move({});
}

Status GatherTier::Impl::gather(std::uint32_t unit,
                                std::span<std::byte> whole) {
  auto others = exchange_->pull(unit, passes_, whole);
  ZINF_TRY(copy_in(unit, whole));
  return others->wait();
}

Result<GatherTier::Split> GatherTier::Impl::add_unit(const UnitSpec& spec,
                                                     StateRef slice,
                                                     void* owner) {
  const std::uint32_t unit = exchange_->next_unit();
  {
    MutexLock lock(mutex_);
    units_[unit] = {spec.name, slice};
  }
  const std::uint64_t bytes = spec.elements * spec.element_bytes;
  ZINF_ASSIGN(StateRef whole,
              residency_->add({.unit = spec.name,
                               .state = "whole",
                               .dtype = "bytes",
                               .shape = {bytes},
                               .bytes = bytes},
                              Home::kBelow, owner, Worth::kLow));
  exchange_->add(spec);  // from here on others may ask for it
  return Split{unit, whole};
}

GatherTier::GatherTier(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

// Others' requests end before what they ask for goes.
GatherTier::~GatherTier() { impl_->exchange_.reset(); }

Result<std::unique_ptr<GatherTier>> GatherTier::create(
    HostTier& host, std::shared_ptr<Comm> comm, GatherTierOptions options) {
  auto impl = std::make_unique<Impl>(host, std::move(options));
  ZINF_TRY(impl->start(std::move(comm)));
  return std::unique_ptr<GatherTier>(new GatherTier(std::move(impl)));
}

Status GatherTier::finish() { return impl_->exchange_->finish(); }

Result<GatherTier::Split> GatherTier::add(const UnitSpec& spec, StateRef slice,
                                          void* owner) {
  return impl_->add_unit(spec, slice, owner);
}

void GatherTier::remove(const Split& split) {
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

Residency& GatherTier::residency() { return *impl_->residency_; }
Exchange& GatherTier::exchange() { return *impl_->exchange_; }

}  // namespace zinf
