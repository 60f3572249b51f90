// Recorded allocate/free events of training steps (bench/micro/record_allocs.py
// describes the format) and their replay against any allocator.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "src/base/strf.h"
#include "zinf/status.h"

namespace zinf {

struct AllocTrace {
  struct Event {
    std::uint32_t slot = 0;
    std::uint32_t bytes = 0;  // 0: free
  };

  std::vector<Event> prefix;  // once
  std::vector<Event> body;    // as often as one likes
  std::vector<std::pair<std::uint32_t, std::uint32_t>> moves;
  std::size_t num_slots = 0;

  static Result<AllocTrace> load(const std::string& path);

  // The most bytes that are ever live.
  std::size_t live_high_bytes() const;
};

namespace detail {

class Leb128Reader {
 public:
  explicit Leb128Reader(std::string data) : data_(std::move(data)) {}

  std::uint64_t next() {
    std::uint64_t value = 0;
    for (int shift = 0; at_ < data_.size() && shift < 64; shift += 7) {
      auto byte = static_cast<std::uint8_t>(data_[at_++]);
      value |= std::uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    failed_ = true;
    return 0;
  }
  bool done() const { return !failed_ && at_ == data_.size(); }
  bool failed() const { return failed_; }

 private:
  std::string data_;
  std::size_t at_ = 8;  // behind the magic
  bool failed_ = false;
};

}  // namespace detail

inline Result<AllocTrace> AllocTrace::load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string data((std::istreambuf_iterator<char>(file)), {});
  if (data.substr(0, 8) != "zinfalc1") {
    return Status::error(Code::kCorrupt,
                         strf("%s: not an allocation trace", path.c_str()));
  }
  detail::Leb128Reader reader(std::move(data));
  auto next = [&] { return static_cast<std::uint32_t>(reader.next()); };
  AllocTrace trace;
  std::vector<std::uint32_t> sizes(next());
  for (std::uint32_t& size : sizes) size = next();
  trace.num_slots = next();
  trace.prefix.resize(next());
  trace.body.resize(next());
  for (auto* events : {&trace.prefix, &trace.body}) {
    for (Event& event : *events) {
      std::uint32_t tagged = next();
      event = {tagged >> 1, (tagged & 1) != 0 ? sizes.at(next()) : 0};
    }
  }
  trace.moves.resize(next());
  for (auto& [from, to] : trace.moves) {
    from = next();
    to = next();
  }
  if (!reader.done()) {
    return Status::error(Code::kCorrupt,
                         strf("%s: wrong length", path.c_str()));
  }
  return trace;
}

inline std::size_t AllocTrace::live_high_bytes() const {
  std::vector<std::size_t> held(num_slots);
  std::size_t live = 0;
  std::size_t high = 0;
  for (const auto* events : {&prefix, &body}) {
    for (Event event : *events) {
      live += event.bytes;
      live -= event.bytes == 0 ? held[event.slot] : 0;
      held[event.slot] = event.bytes;
      high = std::max(high, live);
    }
  }
  return high;
}

// Plays a trace; blocks that are live at the end are freed by the destructor.
// `Heap` has void* allocate(bytes) and free(pointer, bytes).
template <typename Heap>
class TraceReplay {
 public:
  TraceReplay(const AllocTrace& trace, Heap& heap)
      : trace_(trace), heap_(heap), blocks_(trace.num_slots) {}
  ~TraceReplay() {
    for (std::uint32_t slot = 0; slot < blocks_.size(); ++slot) release(slot);
  }
  TraceReplay(const TraceReplay&) = delete;
  TraceReplay& operator=(const TraceReplay&) = delete;

  std::size_t live_bytes() const { return live_bytes_; }
  std::size_t live_high_bytes() const { return live_high_bytes_; }
  std::size_t num_events() const { return num_events_; }

  // The prefix, and the body at least once and until so many events are over.
  // False when an allocation failed.
  bool run(std::size_t num_events) {
    if (!play(trace_.prefix)) return false;
    do {
      if (!loop_once()) return false;
    } while (num_events_ < num_events);
    return true;
  }

  // Stops in the middle, when so many bytes are live for the first time.
  void run_until_live(std::size_t bytes) {
    stop_at_live_ = bytes;
    if (play(trace_.prefix) && live_bytes_ < bytes) play(trace_.body);
  }

  bool loop_once() {
    if (!play(trace_.body)) return false;
    std::vector<Block> old = blocks_;
    for (auto [from, to] : trace_.moves) blocks_[from] = {};
    for (auto [from, to] : trace_.moves) blocks_[to] = old[from];
    return true;
  }

 private:
  struct Block {
    void* pointer = nullptr;
    std::size_t bytes = 0;
  };

  bool play(const std::vector<AllocTrace::Event>& events) {
    for (AllocTrace::Event event : events) {
      if (event.bytes == 0) {
        release(event.slot);
        continue;
      }
      void* pointer = heap_.allocate(event.bytes);
      if (pointer == nullptr) return false;
      blocks_[event.slot] = {pointer, event.bytes};
      live_bytes_ += event.bytes;
      live_high_bytes_ = std::max(live_high_bytes_, live_bytes_);
      if (live_bytes_ >= stop_at_live_) break;
    }
    num_events_ += events.size();
    return true;
  }

  void release(std::uint32_t slot) {
    Block block = std::exchange(blocks_[slot], Block{});
    if (block.pointer == nullptr) return;
    heap_.free(block.pointer, block.bytes);
    live_bytes_ -= block.bytes;
  }

  const AllocTrace& trace_;
  Heap& heap_;
  std::vector<Block> blocks_;
  std::size_t live_bytes_ = 0;
  std::size_t live_high_bytes_ = 0;
  std::size_t num_events_ = 0;
  std::size_t stop_at_live_ = ~std::size_t{0};
};

}  // namespace zinf
