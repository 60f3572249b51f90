#include "zinf/budget.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "src/base/check.h"
#include "src/base/mutex.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"

namespace zinf {
namespace {

constexpr std::array<std::string_view, kNumTags> kTagNames = {
    "weight", "master", "moment", "grad", "tensor", "staging", "unit", "other"};

// Counts alone, nothing else is published through them: relaxed is enough.
constexpr auto kRelaxed = std::memory_order_relaxed;

struct Count {
  std::atomic<std::uint64_t> used = 0;
  std::atomic<std::uint64_t> high = 0;

  void raise_high(std::uint64_t value) {
    std::uint64_t seen = high.load(kRelaxed);
    while (seen < value &&
           !high.compare_exchange_weak(seen, value, kRelaxed, kRelaxed)) {
    }
  }

  void add(std::uint64_t bytes) {
    raise_high(used.fetch_add(bytes, kRelaxed) + bytes);
  }

  // False, and nothing is added, when the sum would pass the limit.
  bool add_within(std::uint64_t bytes, std::uint64_t limit) {
    std::uint64_t seen = used.load(kRelaxed);
    do {
      if (seen > limit || bytes > limit - seen) return false;
    } while (
        !used.compare_exchange_weak(seen, seen + bytes, kRelaxed, kRelaxed));
    raise_high(seen + bytes);
    return true;
  }

  TagUsage usage() const { return {used.load(kRelaxed), high.load(kRelaxed)}; }

  // The high until now; the next one begins at what is used.
  std::uint64_t restart_high() {
    std::uint64_t before = high.exchange(0, kRelaxed);
    raise_high(used.load(kRelaxed));
    return before;
  }
};

struct Highs {
  std::uint64_t total = 0;
  std::array<std::uint64_t, kNumTags> by_tag = {};

  void raise(const Highs& other) {
    total = std::max(total, other.total);
    for (std::size_t i = 0; i < kNumTags; ++i)
      by_tag[i] = std::max(by_tag[i], other.by_tag[i]);
  }
};

}  // namespace

std::string_view tag_name(Tag tag) {
  return kTagNames[static_cast<std::size_t>(tag)];
}

struct Budget::State {
  State(std::string given_name, std::uint64_t given_limit)
      : name(std::move(given_name)), limit_bytes(given_limit) {}

  Count& of(Tag tag) { return by_tag[static_cast<std::size_t>(tag)]; }
  BudgetUsage usage() const;
  Status refusal(Tag tag, std::uint64_t wanted) const;

  // Gives the highs until now to all watches, which begin again at what is
  // used.
  void restart_highs() ZINF_REQUIRES(watch_mutex);

  const std::string name;
  std::atomic<std::uint64_t> limit_bytes;
  Count total;
  std::array<Count, kNumTags> by_tag;

  Mutex watch_mutex;  // of nothing that reserves
  std::map<const BudgetWatch*, Highs> watches ZINF_GUARDED_BY(watch_mutex);
};

BudgetUsage Budget::State::usage() const {
  BudgetUsage usage;
  usage.limit_bytes = limit_bytes;
  usage.total = total.usage();
  for (std::size_t i = 0; i < kNumTags; ++i)
    usage.by_tag[i] = by_tag[i].usage();
  return usage;
}

void Budget::State::restart_highs() {
  Highs highs = {.total = total.restart_high()};
  for (std::size_t i = 0; i < kNumTags; ++i)
    highs.by_tag[i] = by_tag[i].restart_high();
  for (auto& [watch, seen] : watches) seen.raise(highs);
}

Status Budget::State::refusal(Tag tag, std::uint64_t wanted) const {
  BudgetUsage now = usage();
  std::string holders;
  for (std::size_t i = 0; i < kNumTags; ++i) {
    if (now.by_tag[i].used_bytes == 0) continue;
    holders += strf("%s%.*s %s", holders.empty() ? "" : ", ", len(kTagNames[i]),
                    kTagNames[i].data(),
                    format_bytes(now.by_tag[i].used_bytes).c_str());
  }
  std::string_view tag_text = tag_name(tag);
  return Status::error(
      Code::kOverBudget,
      strf("budget \"%s\" of %s: %.*s wants %s more, which needs at least %llu "
           "bytes (%s): %s is used (%s)",
           name.c_str(), format_bytes(limit_bytes).c_str(), len(tag_text),
           tag_text.data(), format_bytes(wanted).c_str(),
           static_cast<unsigned long long>(now.total.used_bytes + wanted),
           format_bytes(now.total.used_bytes + wanted).c_str(),
           format_bytes(now.total.used_bytes).c_str(),
           holders.empty() ? "by nobody" : holders.c_str()));
}

Result<Budget> Budget::create(std::string name, std::uint64_t limit_bytes) {
  if (limit_bytes == 0) {
    return Status::error(
        Code::kInvalid,
        strf("budget \"%s\": a limit of 0 bytes holds nothing", name.c_str()));
  }
  if (limit_bytes > kAddressSpaceBytes) {
    return Status::error(
        Code::kInvalid,
        strf("budget \"%s\": %s is more than a process can address (%s)",
             name.c_str(), format_bytes(limit_bytes).c_str(),
             format_bytes(kAddressSpaceBytes).c_str()));
  }
  return Budget(std::make_shared<State>(std::move(name), limit_bytes));
}

Result<Reservation> Budget::reserve(Tag tag, std::uint64_t bytes) const {
  Reservation reservation(state_, tag);
  ZINF_TRY(reservation.grow(bytes));
  return reservation;
}

void Budget::set_limit(std::uint64_t limit_bytes) const {
  ZINF_CHECK(limit_bytes > 0 && limit_bytes <= kAddressSpaceBytes,
             "a limit of %llu bytes",
             static_cast<unsigned long long>(limit_bytes));
  state_->limit_bytes = limit_bytes;
}

BudgetUsage Budget::usage() const { return state_->usage(); }
const std::string& Budget::name() const { return state_->name; }

Reservation::Reservation(Reservation&& other) noexcept
    : state_(std::move(other.state_)),
      tag_(other.tag_),
      bytes_(std::exchange(other.bytes_, 0)) {}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    shrink(bytes_);
    state_ = std::move(other.state_);
    tag_ = other.tag_;
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Reservation::~Reservation() { shrink(bytes_); }

Status Reservation::grow(std::uint64_t bytes) {
  if (bytes == 0) return {};
  if (state_ == nullptr) {
    return Status::error(Code::kInvalid,
                         "a reservation without a budget cannot grow");
  }
  if (bytes > kAddressSpaceBytes) {
    return Status::error(
        Code::kInvalid,
        strf("budget \"%s\": %s is more than a process can address (%s)",
             state_->name.c_str(), format_bytes(bytes).c_str(),
             format_bytes(kAddressSpaceBytes).c_str()));
  }
  if (!state_->total.add_within(bytes, state_->limit_bytes)) {
    return state_->refusal(tag_, bytes);
  }
  state_->of(tag_).add(bytes);
  bytes_ += bytes;
  return {};
}

void Reservation::grow_beyond_limit(std::uint64_t bytes) {
  if (bytes == 0 || state_ == nullptr) return;
  state_->total.add(bytes);
  state_->of(tag_).add(bytes);
  bytes_ += bytes;
}

void Reservation::shrink(std::uint64_t bytes) {
  ZINF_CHECK(bytes <= bytes_, "gives back %llu bytes of %llu",
             static_cast<unsigned long long>(bytes),
             static_cast<unsigned long long>(bytes_));
  if (bytes == 0) return;
  bytes_ -= bytes;
  state_->of(tag_).used.fetch_sub(bytes, kRelaxed);
  state_->total.used.fetch_sub(bytes, kRelaxed);
}

BudgetWatch::BudgetWatch(const Budget& budget) : state_(budget.state_) {
  MutexLock lock(state_->watch_mutex);
  state_->restart_highs();
  state_->watches[this];
}

BudgetWatch::~BudgetWatch() {
  MutexLock lock(state_->watch_mutex);
  state_->watches.erase(this);
}

BudgetUsage BudgetWatch::usage() const {
  MutexLock lock(state_->watch_mutex);
  const Highs& seen = state_->watches.at(this);
  BudgetUsage usage = state_->usage();
  usage.total.high_bytes = std::max(usage.total.high_bytes, seen.total);
  for (std::size_t i = 0; i < kNumTags; ++i) {
    usage.by_tag[i].high_bytes =
        std::max(usage.by_tag[i].high_bytes, seen.by_tag[i]);
  }
  return usage;
}

Reservation reserve_or_exceed(const Budget& budget, Tag tag,
                              std::uint64_t bytes,
                              const std::function<void()>& make_room) {
  auto reservation = budget.reserve(tag, bytes);
  if (!reservation.ok()) {
    make_room();
    reservation = budget.reserve(tag, bytes);
  }
  if (!reservation.ok()) {
    reservation = budget.reserve(tag, 0);
    reservation->grow_beyond_limit(bytes);
  }
  return std::move(reservation).value();
}

}  // namespace zinf
