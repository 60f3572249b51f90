#include "zinf/trace_book.h"

#include <algorithm>
#include <utility>

#include "src/base/check.h"

namespace zinf {
namespace {

// Of a position, after what came before it (splitmix64's mixing).
std::uint64_t hash_on(std::uint64_t hash, std::span<const StateUse> at_once) {
  const auto mix = [&](std::uint64_t value) {
    hash += value + 0x9e3779b97f4a7c15;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
    hash ^= hash >> 31;
  };
  for (const StateUse& use : at_once)
    mix(std::uint64_t{use.state} << 8 | static_cast<std::uint8_t>(use.kind));
  mix(at_once.size());
  return hash;
}

}  // namespace

TraceBook::TraceBook(std::size_t max_traces) : max_traces_(max_traces) {
  ZINF_CHECK(max_traces > 0, "a book without a trace");
}

const Trace* TraceBook::trace() const {
  return known_.empty() ? nullptr : &known_[followed_].trace;
}

std::uint64_t TraceBook::trace_id() const {
  return known_.empty() ? 0 : known_[followed_].id;
}

Follow TraceBook::use(std::uint32_t state, UseKind kind) {
  const StateUse use{.state = state, .kind = kind};
  return this->use({&use, 1});
}

Follow TraceBook::use(std::span<const StateUse> at_once) {
  step_.add(at_once);
  at_once = step_.at(step_.size() - 1);
  step_hash_ = hash_on(step_hash_, at_once);
  ++stats_.positions;
  if (known_.empty()) return Follow::kRecording;
  if (expected(at_once, position_)) {
    follow(followed_, position_);
    ++num_expected_;
    return Follow::kExpected;
  }
  ++stats_.deviations;
  if (switch_trace()) return Follow::kSwitched;
  return rejoin(at_once) ? Follow::kRejoined : Follow::kUnknown;
}

bool TraceBook::expected(std::span<const StateUse> at_once,
                         std::size_t position) const {
  return std::ranges::equal(known_[followed_].trace.at(position), at_once);
}

// Goes on behind this position of this trace.
void TraceBook::follow(std::size_t known, std::size_t position) {
  if (known != followed_) left_at_.reset();
  followed_ = known;
  position_ = (position + 1) % known_[known].trace.size();
}

bool TraceBook::switch_trace() {
  for (std::size_t i = 0; i < known_.size(); ++i) {
    const auto& hashes = known_[i].prefix_hash;
    if (step_.size() >= hashes.size() || hashes[step_.size()] != step_hash_)
      continue;
    follow(i, step_.size() - 1);
    num_expected_ = step_.size();
    return true;
  }
  return false;
}

bool TraceBook::rejoin(std::span<const StateUse> at_once) {
  const std::size_t left_at = position_;
  if (left_at_ && expected(at_once, *left_at_)) {
    follow(followed_, *left_at_);
    left_at_.reset();
    return true;
  }
  if (rejoin_in(followed_, at_once)) {
    left_at_ = left_at;
    return true;
  }
  for (std::size_t i = 0; i < known_.size(); ++i)
    if (rejoin_in(i, at_once)) return true;
  return false;
}

// At the next position of this trace, going round, that is the same.
bool TraceBook::rejoin_in(std::size_t known,
                          std::span<const StateUse> at_once) {
  if (at_once.empty()) return false;
  const Known& in = known_[known];
  const auto found = in.positions.find(at_once[0].state);
  if (found == in.positions.end()) return false;
  const auto& positions = found->second;
  const std::size_t here = known == followed_ ? position_ : 0;
  const auto first = std::ranges::lower_bound(positions, here);
  const auto same = [&](std::uint32_t position) {
    return std::ranges::equal(in.trace.at(position), at_once);
  };
  auto next = std::find_if(first, positions.end(), same);
  if (next == positions.end()) {
    next = std::find_if(positions.begin(), first, same);
    if (next == first) return false;
  }
  follow(known, *next);
  return true;
}

void TraceBook::end_step() {
  ++stats_.steps;
  if (!step_.empty()) learn();
  step_.clear();
  step_hash_ = 0;
  num_expected_ = 0;
  position_ = 0;
  left_at_.reset();
}

// See Note [Known traces].
void TraceBook::learn() {
  const auto equal = std::ranges::find_if(known_, [&](const Known& known) {
    return known.prefix_hash.back() == step_hash_ && known.trace == step_;
  });
  const std::size_t followed_size =
      known_.empty() ? 0 : known_[followed_].trace.size();
  const bool is_variant = 4 * std::min(num_expected_, followed_size) >=
                          3 * std::max(step_.size(), followed_size);
  if (equal != known_.end()) {
    followed_ = equal - known_.begin();
  } else if (is_variant) {
    if (variant_ != step_) {
      variant_ = std::move(step_);
      known_[followed_].last_followed = stats_.steps;
      return;
    }
    known_[followed_] = know(std::move(step_));
  } else {
    if (known_.size() == max_traces_)
      known_.erase(std::ranges::min_element(known_, {}, &Known::last_followed));
    known_.push_back(know(std::move(step_)));
    followed_ = known_.size() - 1;
  }
  variant_.clear();
  known_[followed_].last_followed = stats_.steps;
}

TraceBook::Known TraceBook::know(Trace trace) {
  Known known;
  known.id = next_id_++;
  known.trace = std::move(trace);
  known.prefix_hash.push_back(0);
  for (std::uint32_t p = 0; p < known.trace.size(); ++p) {
    const auto at_once = known.trace.at(p);
    known.prefix_hash.push_back(hash_on(known.prefix_hash.back(), at_once));
    for (const StateUse& use : at_once) known.positions[use.state].push_back(p);
  }
  return known;
}

std::vector<StateUse> TraceBook::upcoming(std::size_t num_positions) const {
  std::vector<StateUse> uses;
  if (known_.empty()) return uses;
  const Trace& trace = known_[followed_].trace;
  for (std::size_t i = 0; i < std::min(num_positions, trace.size()); ++i) {
    const auto at_once = trace.at((position_ + i) % trace.size());
    uses.insert(uses.end(), at_once.begin(), at_once.end());
  }
  return uses;
}

std::optional<std::size_t> TraceBook::until_use(std::uint32_t state) const {
  if (known_.empty()) return std::nullopt;
  const Known& in = known_[followed_];
  const auto found = in.positions.find(state);
  if (found == in.positions.end()) return std::nullopt;
  const auto& positions = found->second;
  auto next = std::ranges::lower_bound(positions, position_);
  const std::size_t rounds = next == positions.end() ? 1 : 0;
  if (rounds == 1) next = positions.begin();
  if (in.trace.at(*next)[0] == StateUse{state, UseKind::kFree})
    return std::nullopt;
  return *next + rounds * in.trace.size() - position_;
}

}  // namespace zinf
