// The queue behind an Io: one thread that cuts requests into blocks, keeps the
// driver full, checks every completion and finishes requests.
//
// Life of a request: submit() puts it into `incoming_`; the pump's thread moves
// it to a queue, issues its blocks in order as places become free, and when its
// last block is back stores the outcome and wakes whoever waits. Reads have a
// queue of their own, and the queues take turns; what somebody waits for goes
// first, before whatever was asked for ahead of need. Small neighbours in the
// file that wait in the same queue are joined to one block; when that does not
// go through as a whole, each of them is tried by itself.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "src/base/mutex.h"
#include "src/io/driver.h"
#include "zinf/io.h"

namespace zinf::io::detail {

struct FileState {
  std::shared_ptr<Pump> pump;
  std::string path;
  OpenedFile opened;
  std::atomic<std::uint64_t> bytes = 0;
  std::atomic<int> pending = 0;  // requests that are not done
};

struct RequestState {
  // Const after submission.
  Operation operation = Operation::kRead;
  std::shared_ptr<FileState> file;
  std::uint64_t offset = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;

  // The pump's thread only.
  std::size_t issued = 0;  // bytes handed out in blocks
  int blocks = 0;          // parts with the driver, or about to be
  int blocked_by = 0;      // a sync: earlier writes that are not done
  std::vector<std::shared_ptr<RequestState>> syncs;  // that wait for this write

  // Written by the pump's thread before `done`, read by others after it.
  Status status;
  std::atomic<std::uint32_t> done = 0;

  bool seen = false;  // the owner of the Request has asked for the status
  // Somebody waits for it: it goes before others.
  mutable std::atomic<bool> awaited = false;

  void finish(Status outcome);
  void wait() const;
};

class Pump {
 public:
  static Result<std::shared_ptr<Pump>> create(const Options& options);
  ~Pump();

  const Options& options() const { return options_; }
  Backend backend() const { return backend_; }
  const std::string& reason() const { return reason_; }
  Stats stats() const;

  void submit(std::shared_ptr<RequestState> request);
  // A Plug of this thread; at its end, or before, what it holds back begins.
  static void begin_plug(Plug* plug);
  static void end_plug(Plug* plug);
  void let_go();
  void drain();
  void shutdown();

  Result<OpenedFile> open(const std::string& path, const OpenOptions& options);
  void close(FileState& file);
  Status remove(const std::string& path);
  Status resize(FileState& file, std::uint64_t bytes);
  std::vector<int> register_memory(std::span<std::byte> memory);
  void unregister_memory(const std::vector<int>& slots);

 private:
  // What a block moves for a request.
  struct Part {
    std::shared_ptr<RequestState> request;
    std::uint64_t offset = 0;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  struct Block : RawOp {
    std::vector<Part> parts;  // in the order of the file
    std::size_t wanted = 0;   // of the whole block; offset and data move on
    std::uint64_t begin = 0;
    int retries = 0;

    bool joined() const { return parts.size() > 1; }
    const FileState& of() const { return *parts.front().request->file; }
  };
  struct Retry {
    Block* block;
    std::chrono::steady_clock::time_point due;
  };
  struct Slot {
    const std::byte* begin;
    const std::byte* end;
    int slot;
  };

  explicit Pump(const Options& options) : options_(options) {}

  Status start();
  Status choose_driver();
  void run();
  bool call(const std::function<void()>& action);
  void wake_locked() ZINF_REQUIRES(mutex_);
  void let_go_locked() ZINF_REQUIRES(mutex_);

  // On the pump's thread.
  void collect();
  bool in_flight_with(int slot) const;
  bool take_incoming();
  void admit(std::shared_ptr<RequestState> request);
  using Queue = std::deque<std::shared_ptr<RequestState>>;
  Queue& queue_of(const RequestState& request);
  // Puts what is to be issued next at the front of its queue.
  Queue& next_queue();
  void issue_blocks();
  // The next part of a request that has one.
  Part take_part(const std::shared_ptr<RequestState>& request);
  Block* block_for(Part part);  // not started yet
  void join_neighbours(Block& block, Queue& queue);
  bool is_neighbour(const RequestState& request, const Block& block) const;
  void note_time();
  void start_block(Block* block);
  std::chrono::nanoseconds start_due_retries();
  void complete(Block* block);
  bool continue_block(Block* block);
  void set_apart(Block* block);
  void end_block(Block* block);
  void end_part(const Part& part);
  void end_request(const std::shared_ptr<RequestState>& request);
  void cancel_queue();
  int slot_of(const std::byte* data, std::size_t bytes) const;

  // Const after start().
  const Options options_;
  Backend backend_ = Backend::kAuto;
  std::string reason_;
  std::thread thread_;

  // The pump's thread only.
  std::unique_ptr<Driver> driver_;
  Queue reads_;             // with blocks to issue
  Queue others_;            // the same
  std::deque<Part> apart_;  // of blocks that were joined in vain
  bool read_last_ = false;
  int num_reading_ = 0;  // blocks with the driver
  int num_writing_ = 0;
  std::chrono::steady_clock::time_point noted_;
  std::unordered_set<RequestState*> writes_;    // admitted, not done
  std::vector<std::unique_ptr<Block>> blocks_;  // all, free or in flight
  std::vector<Block*> free_blocks_;
  std::vector<RawOp*> finished_;
  std::vector<Slot> slots_;
  std::vector<Retry> retries_;  // blocks that wait for their next try

  struct Counters {
    std::atomic<std::uint64_t> bytes_read = 0;
    std::atomic<std::uint64_t> bytes_written = 0;
    std::atomic<std::uint64_t> blocks = 0;
    std::atomic<std::uint64_t> joined = 0;
    std::atomic<std::uint64_t> buffered_blocks = 0;
    std::atomic<std::uint64_t> continued = 0;
    std::atomic<std::uint64_t> retried = 0;
    std::atomic<std::uint64_t> turns = 0;
    std::atomic<std::uint64_t> read_ns = 0;
    std::atomic<std::uint64_t> write_ns = 0;
    std::atomic<std::uint64_t> cpu_ns = 0;
  };
  Counters counters_;

  mutable Mutex mutex_;
  CondVar idle_;
  std::vector<std::shared_ptr<RequestState>> incoming_ ZINF_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<RequestState>> held_ ZINF_GUARDED_BY(mutex_);
  int draining_ ZINF_GUARDED_BY(mutex_) = 0;  // threads in drain()
  std::vector<std::function<void()>> actions_ ZINF_GUARDED_BY(mutex_);
  std::size_t pending_ ZINF_GUARDED_BY(mutex_) = 0;  // submitted, not done
  bool sleeping_ ZINF_GUARDED_BY(mutex_) = false;
  bool stopping_ ZINF_GUARDED_BY(mutex_) = false;
};

}  // namespace zinf::io::detail
