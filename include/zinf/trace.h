// A Trace: the order in which one step uses states.
//
// A position is one moment of the step: the states that an operator uses at
// once, and that must be in memory together. The step repeats: after the last
// position comes the first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zinf {

enum class UseKind : std::uint8_t {
  kRead,
  kChange,   // the content is new afterwards
  kReplace,  // as kChange, and the old content does not matter
  kFree,     // the content ends; memory and the place below are given back
};

struct StateUse {
  std::uint32_t state = 0;  // index
  UseKind kind = UseKind::kRead;
  bool operator==(const StateUse&) const = default;
};

// A value; one thread at a time.
class Trace {
 public:
  // Adds a position. Uses of one state become one: kChange when they differ. A
  // kFree has its position alone.
  void add(std::span<const StateUse> at_once);
  void add(StateUse use) { add({&use, 1}); }
  void clear();

  std::size_t size() const { return ends_.size(); }  // positions
  bool empty() const { return ends_.empty(); }

  std::span<const StateUse> at(std::size_t position) const {
    return std::span(uses_).subspan(begin(position),
                                    ends_[position] - begin(position));
  }
  // The index in uses() of the position's first use.
  std::size_t begin(std::size_t position) const {
    return position == 0 ? 0 : ends_[position - 1];
  }
  // All, in order.
  std::span<const StateUse> uses() const { return uses_; }

  bool operator==(const Trace&) const = default;

 private:
  std::vector<StateUse> uses_;
  std::vector<std::uint32_t> ends_;  // of each position in uses_
};

}  // namespace zinf
