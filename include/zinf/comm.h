// Messages between the ranks of a group.
//
// A Comm is one rank's end. The ranks are processes that torchrun or mpirun has
// started, or threads of this process (tests); all back ends pass one suite,
// tests/support/comm_suite.h. Thread-safe.
//
// Note [Lanes]: between two ranks, the messages of one lane are received in the
// order in which they were sent. Lanes do not wait for each other, so what is
// asked for on one lane can be answered on another while more is asked.
//
// A send is over when its memory may be used again: the receiver may not have
// asked for it yet, or the send waits for that. So nobody may wait for a send
// before it has started the receives that the others' sends wait for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "zinf/move.h"
#include "zinf/status.h"

namespace zinf {

enum class Lane : std::uint8_t {
  kRequests,     // who asks for something
  kWeights,      // answers
  kGrads,        // what nobody has asked for
  kCollectives,  // zinf/collectives.h
};
inline constexpr std::size_t kNumLanes = 4;

struct CommStats {
  struct Traffic {
    std::uint64_t messages = 0;
    std::uint64_t bytes = 0;
  };
  Traffic sent[kNumLanes];
  Traffic received[kNumLanes];

  std::uint64_t bytes_sent() const;
  std::uint64_t bytes_received() const;
};

class Comm {
 public:
  // Gives up what is under way. Other ranks find this one gone.
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual std::string_view backend() const = 0;  // "threads", "mpi", "gloo"
  // How messages call a rank, and how many there are: of a view those of the
  // whole group.
  virtual int number(int rank) const { return rank; }
  virtual int total() const { return size_; }

  // Both ends name the same number of bytes, which may be any. REQUIRES another
  // rank. The errors: kGone when that rank has ended, what close() was given,
  // or what the back end says.
  std::unique_ptr<Move> send(int to, Lane lane,
                             std::span<const std::byte> from);
  std::unique_ptr<Move> receive(int from, Lane lane, std::span<std::byte> into);

  // Everything of this rank that is under way, and all that comes later, fails
  // with this. The first one counts. Others may wait on, until it is gone.
  virtual void close(const Status& why) = 0;

  // Since the start; what was started counts.
  CommStats stats() const;

 protected:
  Comm(int rank, int size) : rank_(rank), size_(size) {}

 private:
  virtual std::unique_ptr<Move> start_send(int to, Lane lane,
                                           std::span<const std::byte> from) = 0;
  virtual std::unique_ptr<Move> start_receive(int from, Lane lane,
                                              std::span<std::byte> into) = 0;

  struct Counter {
    std::atomic<std::uint64_t> messages = 0;
    std::atomic<std::uint64_t> bytes = 0;
  };
  static void count(Counter& counter, std::size_t bytes);
  void check_peer(int peer) const;

  const int rank_;
  const int size_;
  Counter sent_[kNumLanes];
  Counter received_[kNumLanes];
};

// Some ranks of a group as a group, in that order; this one is among them. Its
// messages are messages of the group: between two ranks, a lane is for one view
// at a time. What is closed is the group.
std::unique_ptr<Comm> make_view(std::shared_ptr<Comm> comm,
                                std::vector<int> ranks);

// "rank 2 of 4 is gone: WHY".
Status rank_is_gone(int rank, int size, std::string_view why);

// The ends of a group of threads, by rank. An end that is destroyed is a rank
// that has ended.
struct ThreadGroupOptions {
  // From one rank to another, each by itself; 0: as fast as memory.
  double bytes_per_second = 0;
};
std::vector<std::unique_ptr<Comm>> make_thread_group(
    int size, const ThreadGroupOptions& options = {});

}  // namespace zinf
