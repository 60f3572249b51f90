// A TraceBook follows the uses of states as they happen and foretells the next.
//
// The first step is recorded; later ones are compared with what is known while
// they happen. A use that is not the expected one (a branch, MoE routing, eval,
// generate, another batch shape) is a deviation: the book goes on at the next
// place where it knows that use, and no trace is forgotten for it.
//
//   book.use(weight, UseKind::kRead);
//   for (StateUse use : book.upcoming(8)) residency.prefetch(...);
//   ...
//   book.end_step();
//
// Note [Known traces]: what end_step() makes of a step.
//   - Equal to a known trace: that one is followed from now on.
//   - Much the same as the followed one (three quarters of the positions were
//     expected): a variant. It takes that trace's place when the next step is
//     the same again, so that states which came or went are learned and a
//     routing that changes every step is not.
//   - Else it is a new trace. Beyond max_traces the one that was followed the
//     longest ago goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "zinf/trace.h"

namespace zinf {

enum class Follow : std::uint8_t {
  kRecording,  // nothing is known yet
  kExpected,
  kSwitched,  // not expected, but another known trace began like this step
  kRejoined,  // not expected here: went on where the use is known
  kUnknown,   // not expected, and in no known trace: the position stays
};

struct TraceBookStats {
  std::uint64_t steps = 0;
  std::uint64_t positions = 0;   // ever fed
  std::uint64_t deviations = 0;  // of these, not kRecording and not kExpected
};

// One thread at a time. Every use costs O(1) when it is expected, otherwise a
// search among the known uses of its state.
class TraceBook {
 public:
  explicit TraceBook(std::size_t max_traces = 8);  // at least 1

  // One position of the step.
  Follow use(std::span<const StateUse> at_once);
  Follow use(std::uint32_t state, UseKind kind);
  void end_step();

  // The followed trace, null while nothing is known. Valid until end_step() or
  // a use that is not kExpected. Its id is another one for other content: what
  // was planned for the id fits.
  const Trace* trace() const;
  std::uint64_t trace_id() const;
  // Of the next expected use in it.
  std::size_t position() const { return position_; }

  // The uses of the next positions, over the end of the step into the next one,
  // but at most one step's. Empty while nothing is known.
  std::vector<StateUse> upcoming(std::size_t num_positions) const;

  // How many positions from here until the state is used: 0 for the next
  // position. Nothing when the followed trace does not use it, or only frees
  // it before.
  std::optional<std::size_t> until_use(std::uint32_t state) const;

  std::size_t num_traces() const { return known_.size(); }
  const TraceBookStats& stats() const { return stats_; }

 private:
  struct Known {
    std::uint64_t id = 0;
    std::uint64_t last_followed = 0;  // step
    Trace trace;
    std::vector<std::uint64_t> prefix_hash;  // of the first so many positions
    // state -> its positions, ascending
    std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> positions;
  };

  Known know(Trace trace);
  bool expected(std::span<const StateUse> at_once, std::size_t position) const;
  bool switch_trace();
  bool rejoin(std::span<const StateUse> at_once);
  bool rejoin_in(std::size_t known, std::span<const StateUse> at_once);
  void follow(std::size_t known, std::size_t position);
  void learn();

  const std::size_t max_traces_;
  std::vector<Known> known_;
  std::size_t followed_ = 0;  // index in known_
  std::size_t position_ = 0;
  // Where the last deviation left the trace: an extra use goes back there.
  std::optional<std::size_t> left_at_;

  Trace step_;  // what was used since end_step()
  std::uint64_t step_hash_ = 0;
  std::size_t num_expected_ = 0;  // positions of it
  Trace variant_;                 // the last step, if it was one
  std::uint64_t next_id_ = 1;
  TraceBookStats stats_;
};

}  // namespace zinf
