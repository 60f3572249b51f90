#include "src/io/pump.h"

#include <limits.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <future>
#include <iterator>
#include <memory>
#include <utility>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/cpu_time.h"
#include "src/base/start_thread.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/fault_injector.h"
#include "zinf/log.h"

namespace zinf::io::detail {
namespace {

constexpr int kMaxRetries = 200;    // of EAGAIN in a row, over about a second
constexpr int kRetriesAtOnce = 20;  // before it waits in between
constexpr std::chrono::milliseconds kRetryPause(5);
constexpr std::size_t kMaxSlotBytes = kGiB;  // the kernel's limit for one

// How much of [offset, offset + left) the next block takes: whole aligned
// blocks where it can, an odd head or tail by itself.
std::size_t next_block_bytes(std::uint64_t offset, const std::byte* data,
                             std::size_t left, std::size_t block_bytes) {
  constexpr std::size_t kAlign = File::kAlignment;
  std::size_t odd_offset = offset % kAlign;
  std::size_t odd_data = reinterpret_cast<std::uintptr_t>(data) % kAlign;
  if (odd_offset == 0 && odd_data == 0) {
    std::size_t aligned = std::min(block_bytes, align_down(left, kAlign));
    return aligned > 0 ? aligned : left;
  }
  if (odd_offset == odd_data) return std::min(left, kAlign - odd_offset);
  return std::min(left, block_bytes);
}

bool aligned(const RawOp& op) {
  return op.offset % File::kAlignment == 0 &&
         op.bytes % File::kAlignment == 0 &&
         is_aligned(op.data, File::kAlignment);
}

thread_local Plug* plug_here = nullptr;  // of this thread, if it has one

}  // namespace

void RequestState::finish(Status outcome) {
  status = std::move(outcome);
  // Release: whoever sees done == 1 sees the status and the transferred bytes.
  done.store(1, std::memory_order_release);
  done.notify_all();
}

void RequestState::wait() const {
  awaited.store(true, std::memory_order_relaxed);
  if (done.load(std::memory_order_acquire) == 0) file->pump->let_go();
  done.wait(0, std::memory_order_acquire);
}

Result<std::shared_ptr<Pump>> Pump::create(const Options& options) {
  ZINF_TRY(options.validate());
  std::shared_ptr<Pump> pump(new Pump(options));
  ZINF_TRY(pump->start());
  return pump;
}

Pump::~Pump() { shutdown(); }

Status Pump::start() {
  std::promise<Status> started;
  std::future<Status> outcome = started.get_future();
  // The ring belongs to the thread that makes it.
  Status thread = start_thread(thread_, [this, &started] {
    pthread_setname_np(pthread_self(), "zinf-io");
    Status status = choose_driver();
    bool runs = status.ok();
    started.set_value(std::move(status));
    if (runs) run();
    driver_.reset();
  });
  Status status = thread.ok() ? outcome.get() : thread;
  if (!status.ok()) {
    if (thread_.joinable()) thread_.join();
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  return status;
}

Status Pump::choose_driver() {
  auto begin = [&](Backend backend, std::unique_ptr<Driver> driver) {
    auto injector = FaultInjector::installed();
    if (!options_.faults.empty() || injector != nullptr) {
      driver = make_fault_driver(std::move(driver), options_.faults,
                                 std::move(injector));
    }
    Status status = driver->begin();
    if (!status.ok()) return status;
    backend_ = backend;
    reason_ = driver->description();
    driver_ = std::move(driver);
    return status;
  };
  if (options_.backend != Backend::kAuto) {
    log(LogLevel::kInfo, "io: %s, as was asked for",
        backend_name(options_.backend).data());
  }
  switch (options_.backend) {
    case Backend::kUring:
      return begin(Backend::kUring, make_uring_driver(options_));
    case Backend::kThreads:
      return begin(Backend::kThreads, make_threads_driver(options_));
    case Backend::kMemory:
      return begin(Backend::kMemory, make_memory_driver(options_.disk));
    case Backend::kAuto:
      break;
  }
  Status ring = begin(Backend::kUring, make_uring_driver(options_));
  if (ring.ok()) {
    log(LogLevel::kInfo, "io: %s: the system allows it", reason_.c_str());
    return ring;
  }
  ZINF_TRY(begin(Backend::kThreads, make_threads_driver(options_)));
  reason_ += strf(" (no io_uring: %s)", ring.text().c_str());
  log(LogLevel::kWarning, "io: %s", reason_.c_str());
  return {};
}

Stats Pump::stats() const {
  return {.bytes_read = counters_.bytes_read,
          .bytes_written = counters_.bytes_written,
          .blocks = counters_.blocks,
          .buffered_blocks = counters_.buffered_blocks,
          .joined = counters_.joined,
          .continued = counters_.continued,
          .retried = counters_.retried,
          .turns = counters_.turns,
          .read_ns = counters_.read_ns,
          .write_ns = counters_.write_ns,
          .cpu_ns = counters_.cpu_ns};
}

void Pump::submit(std::shared_ptr<RequestState> request) {
  MutexLock lock(mutex_);
  if (stopping_) {
    request->finish(Status::error(Code::kCancelled, "the Io is shut down"));
    return;
  }
  ++pending_;
  ++request->file->pending;
  if (plug_here != nullptr && draining_ == 0 &&
      request->bytes < options_.block_bytes) {
    auto& pumps = plug_here->pumps_;
    if (std::ranges::find(pumps, request->file->pump) == pumps.end()) {
      pumps.push_back(request->file->pump);
    }
    held_.push_back(std::move(request));
    return;
  }
  if (request->operation == Operation::kSync) let_go_locked();
  incoming_.push_back(std::move(request));
  wake_locked();
}

void Pump::begin_plug(Plug* plug) {
  if (plug_here == nullptr) plug_here = plug;
}

void Pump::end_plug(Plug* plug) {
  if (plug_here != plug) return;
  plug_here = nullptr;
  for (const auto& pump : plug->pumps_) pump->let_go();
}

void Pump::let_go() {
  MutexLock lock(mutex_);
  if (!stopping_) let_go_locked();
}

void Pump::let_go_locked() {
  if (held_.empty()) return;
  std::ranges::move(held_, std::back_inserter(incoming_));
  held_.clear();
  wake_locked();
}

// Under the lock: as long as stopping_ is false the driver is there.
void Pump::wake_locked() {
  if (std::exchange(sleeping_, false)) driver_->wake();
}

void Pump::drain() {
  MutexLock lock(mutex_);
  let_go_locked();
  ++draining_;
  while (pending_ > 0) idle_.wait(mutex_);
  --draining_;
}

void Pump::shutdown() {
  {
    MutexLock lock(mutex_);
    if (stopping_) return;
    let_go_locked();
    stopping_ = true;
    wake_locked();
  }
  thread_.join();
}

// Runs the action on the pump's thread; false when that has ended.
bool Pump::call(const std::function<void()>& action) {
  std::promise<void> done;
  {
    MutexLock lock(mutex_);
    if (stopping_) return false;
    actions_.emplace_back([&] {
      action();
      done.set_value();
    });
    wake_locked();
  }
  done.get_future().wait();
  return true;
}

Result<OpenedFile> Pump::open(const std::string& path,
                              const OpenOptions& options) {
  Result<OpenedFile> opened =
      Status::error(Code::kCancelled, "open " + path + ": the Io is shut down");
  call([&] { opened = driver_->open(path, options); });
  return opened;
}

void Pump::close(FileState& file) {
  let_go();
  for (int left = file.pending; left > 0; left = file.pending) {
    file.pending.wait(left);
  }
  // After a shutdown the driver has closed what was open.
  call([&] { driver_->close(file.opened.file); });
}

Status Pump::remove(const std::string& path) {
  Status status = Status::error(Code::kCancelled,
                                "remove " + path + ": the Io is shut down");
  call([&] { status = driver_->remove(path); });
  return status;
}

Status Pump::resize(FileState& file, std::uint64_t bytes) {
  Status status = Status::error(
      Code::kCancelled, "resize " + file.path + ": the Io is shut down");
  call([&] {
    status = driver_->resize(file.opened.file, file.path, file.bytes, bytes);
    if (status.ok()) file.bytes = bytes;
  });
  return status;
}

std::vector<int> Pump::register_memory(std::span<std::byte> memory) {
  std::vector<int> slots;
  int error = 0;
  call([&] {
    while (!memory.empty() && error == 0) {
      auto piece = memory.first(std::min(memory.size(), kMaxSlotBytes));
      int slot = driver_->register_memory(piece);
      if (slot < 0) {
        error = -slot;
        break;
      }
      slots.push_back(slot);
      slots_.push_back({piece.data(), piece.data() + piece.size(), slot});
      memory = memory.subspan(piece.size());
    }
  });
  if (error == 0) return slots;
  unregister_memory(slots);
  // Back ends without such a thing say EOPNOTSUPP: nothing to tell. The others
  // say it once.
  static std::atomic<bool> told_once = false;
  bool told = error == EOPNOTSUPP || told_once.exchange(true);
  LogLevel level = told ? LogLevel::kDebug : LogLevel::kWarning;
  log(level, "io: transfers run without registered memory: %s%s",
      Status::system("register", "memory", error).text().c_str(),
      error == ENOMEM ? "; raise RLIMIT_MEMLOCK (ulimit -l)" : "");
  return {};
}

void Pump::unregister_memory(const std::vector<int>& slots) {
  if (slots.empty()) return;
  call([&] {
    for (int slot : slots) {
      std::erase_if(slots_, [&](const Slot& s) { return s.slot == slot; });
      while (in_flight_with(slot)) collect();
      driver_->unregister_memory(slot);
    }
  });
}

// A block may be prepared for the kernel and not be with it yet.
bool Pump::in_flight_with(int slot) const {
  return std::any_of(blocks_.begin(), blocks_.end(),
                     [&](const auto& block) { return block->slot == slot; });
}

void Pump::run() {
  for (int i = 0; i < options_.depth; ++i) {
    blocks_.push_back(std::make_unique<Block>());
    free_blocks_.push_back(blocks_.back().get());
  }
  while (true) {
    bool stopping = take_incoming();
    if (stopping) cancel_queue();
    issue_blocks();
    counters_.cpu_ns = thread_cpu_ns();
    if (stopping && free_blocks_.size() == blocks_.size()) break;
    collect();
  }
}

void Pump::collect() {
  finished_.clear();
  driver_->collect(finished_, start_due_retries());
  note_time();
  ++counters_.turns;
  for (RawOp* op : finished_) complete(static_cast<Block*>(op));
}

// Moves what others have put down to this thread's side, until there is nothing
// left and the next submission must wake it; true when stopping.
bool Pump::take_incoming() {
  std::vector<std::shared_ptr<RequestState>> requests;
  std::vector<std::function<void()>> actions;
  while (true) {
    {
      MutexLock lock(mutex_);
      if (incoming_.empty() && actions_.empty()) {
        sleeping_ = !stopping_;
        return stopping_;
      }
      requests.swap(incoming_);
      actions.swap(actions_);
    }
    for (auto& request : requests) admit(std::move(request));
    for (auto& action : actions) action();
    requests.clear();
    actions.clear();
  }
}

// A sync first waits for the writes to its file that came before it.
void Pump::admit(std::shared_ptr<RequestState> request) {
  if (request->operation == Operation::kWrite) writes_.insert(request.get());
  if (request->operation == Operation::kSync) {
    for (RequestState* write : writes_) {
      if (write->file != request->file) continue;
      write->syncs.push_back(request);
      ++request->blocked_by;
    }
    if (request->blocked_by > 0) return;
  }
  queue_of(*request).push_back(std::move(request));
}

Pump::Queue& Pump::queue_of(const RequestState& request) {
  return request.operation == Operation::kRead ? reads_ : others_;
}

Pump::Queue& Pump::next_queue() {
  for (Queue* queue : {&reads_, &others_}) {
    auto found = std::ranges::find_if(*queue, [](const auto& request) {
      return request->awaited.load(std::memory_order_relaxed);
    });
    if (found == queue->end()) continue;
    std::rotate(queue->begin(), found, found + 1);
    return *queue;
  }
  bool read = others_.empty() || (!reads_.empty() && !read_last_);
  read_last_ = read;
  return read ? reads_ : others_;
}

void Pump::issue_blocks() {
  note_time();
  for (; !free_blocks_.empty() && !apart_.empty(); apart_.pop_front()) {
    start_block(block_for(std::move(apart_.front())));
  }
  while (!free_blocks_.empty() && (!reads_.empty() || !others_.empty())) {
    Queue& queue = next_queue();
    std::shared_ptr<RequestState> request = queue.front();
    if (!request->status.ok()) {  // a block failed: the rest is not started
      queue.pop_front();
      request->issued = request->bytes;
      if (request->blocks == 0) end_request(request);
      continue;
    }
    Part part = take_part(request);
    if (request->issued == request->bytes) queue.pop_front();
    Block* block = block_for(std::move(part));
    join_neighbours(*block, queue);
    start_block(block);
  }
}

// What passed since the last time goes to whom the driver worked for.
void Pump::note_time() {
  auto now = std::chrono::steady_clock::now();
  auto passed = static_cast<std::uint64_t>((now - noted_).count());
  if (num_reading_ > 0) counters_.read_ns += passed;
  if (num_writing_ > 0) counters_.write_ns += passed;
  noted_ = now;
}

Pump::Part Pump::take_part(const std::shared_ptr<RequestState>& request) {
  RequestState& from = *request;
  Part part{.request = request,
            .offset = from.offset + from.issued,
            .data = from.data + from.issued};
  if (from.operation != Operation::kSync) {
    part.bytes = next_block_bytes(
        part.offset, part.data, from.bytes - from.issued, options_.block_bytes);
  }
  from.issued += part.bytes;
  ++from.blocks;
  if (from.operation == Operation::kRead) ++num_reading_;
  if (from.operation == Operation::kWrite) ++num_writing_;
  return part;
}

Pump::Block* Pump::block_for(Part part) {
  Block* block = free_blocks_.back();
  free_blocks_.pop_back();
  const RequestState& from = *part.request;
  block->kind = from.operation;
  block->file = from.file->opened.file;
  block->offset = block->begin = part.offset;
  block->data = part.data;
  block->bytes = block->wanted = part.bytes;
  block->retries = 0;
  block->parts.push_back(std::move(part));
  return block;
}

bool Pump::is_neighbour(const RequestState& request, const Block& block) const {
  if (request.operation != block.kind || request.issued > 0 ||
      request.bytes + block.bytes > options_.block_bytes ||
      request.file.get() != &block.of() || !request.status.ok()) {
    return false;
  }
  bool adjacent = request.offset == block.offset + block.bytes ||
                  request.offset + request.bytes == block.offset;
  return adjacent && request.bytes % File::kAlignment == 0 &&
         is_aligned(request.data, File::kAlignment);
}

void Pump::join_neighbours(Block& block, Queue& queue) {
  constexpr std::size_t kLook = 64;
  if (!block.of().opened.direct || !aligned(block)) return;
  while (block.bytes > 0 && block.bytes < options_.block_bytes &&
         block.parts.size() < IOV_MAX) {
    auto end = queue.begin() +
               static_cast<std::ptrdiff_t>(std::min(queue.size(), kLook));
    auto found = std::find_if(queue.begin(), end, [&](const auto& request) {
      return is_neighbour(*request, block);
    });
    if (found == end) break;
    Part part = take_part(*found);
    queue.erase(found);
    block.bytes += part.bytes;
    if (part.offset > block.offset) {
      block.parts.push_back(std::move(part));
    } else {
      block.offset = part.offset;
      block.data = part.data;
      block.parts.insert(block.parts.begin(), std::move(part));
    }
    ++counters_.joined;
  }
  if (!block.joined()) return;
  block.begin = block.offset;
  block.wanted = block.bytes;
  for (const Part& part : block.parts) {
    block.pieces.push_back({part.data, part.bytes});
  }
}

void Pump::start_block(Block* block) {
  block->direct =
      block->of().opened.direct && (block->joined() || aligned(*block));
  block->slot = block->joined() ? -1 : slot_of(block->data, block->bytes);
  ++counters_.blocks;
  if (!block->direct && block->bytes > 0) ++counters_.buffered_blocks;
  driver_->start(block);
}

// Starts the blocks whose pause is over; the time until the next one's is.
std::chrono::nanoseconds Pump::start_due_retries() {
  std::chrono::nanoseconds next = kForever;
  auto now = std::chrono::steady_clock::now();
  std::erase_if(retries_, [&](const Retry& retry) {
    if (retry.due > now) {
      next = std::min<std::chrono::nanoseconds>(next, retry.due - now);
      return false;
    }
    start_block(retry.block);
    return true;
  });
  return next;
}

int Pump::slot_of(const std::byte* data, std::size_t bytes) const {
  for (const Slot& slot : slots_) {
    if (data >= slot.begin && data + bytes <= slot.end) return slot.slot;
  }
  return -1;
}

void Pump::complete(Block* block) {
  block->slot = -1;
  if (continue_block(block)) return;
  bool failed = block->result < 0 || block->bytes > 0;
  if (failed && block->joined()) return set_apart(block);
  RequestState& request = *block->parts.front().request;
  // The first error stands; a shutdown's cancellation counts as one.
  if (failed && request.status.ok()) {
    Transfer transfer{
        .operation = operation_name(block->kind),
        .path = request.file->path,
        .offset = block->begin,
        .wanted = block->wanted,
        .got = block->wanted - block->bytes,
        .errnum = static_cast<int>(-std::min<std::int64_t>(block->result, 0))};
    request.status =
        block->kind == Operation::kSync
            ? Status::system("sync", request.file->path, transfer.errnum)
            : transfer.failed();
  }
  end_block(block);
}

// Counts what was moved; true when the block went back to the driver for the
// rest of it.
bool Pump::continue_block(Block* block) {
  bool again = block->result == -EINTR || block->result == -EAGAIN;
  if (again && ++block->retries <= kMaxRetries) {
    ++counters_.retried;
    if (block->retries > kRetriesAtOnce) {
      retries_.push_back(
          {block, std::chrono::steady_clock::now() + kRetryPause});
    } else {
      start_block(block);
    }
    return true;
  }
  if (block->result <= 0) return false;
  auto moved = std::min(static_cast<std::size_t>(block->result), block->bytes);
  (block->kind == Operation::kRead ? counters_.bytes_read
                                   : counters_.bytes_written) += moved;
  block->offset += moved;
  block->data += moved;
  block->bytes -= moved;
  block->retries = 0;
  if (block->bytes == 0 || block->joined()) return false;
  ++counters_.continued;
  start_block(block);
  return true;
}

// Some of it may have been moved: it is moved again.
void Pump::set_apart(Block* block) {
  for (Part& part : block->parts) apart_.push_back(std::move(part));
  block->parts.clear();
  block->pieces.clear();
  free_blocks_.push_back(block);
}

void Pump::end_block(Block* block) {
  std::vector<Part> parts = std::exchange(block->parts, {});
  block->pieces.clear();
  free_blocks_.push_back(block);
  for (const Part& part : parts) end_part(part);
}

void Pump::end_part(const Part& part) {
  RequestState& request = *part.request;
  if (request.operation == Operation::kRead) --num_reading_;
  if (request.operation == Operation::kWrite) --num_writing_;
  --request.blocks;
  bool all_issued = request.issued == request.bytes;
  // A failed request that is still queued is ended by issue_blocks().
  if (request.blocks == 0 && all_issued) end_request(part.request);
}

void Pump::end_request(const std::shared_ptr<RequestState>& request) {
  writes_.erase(request.get());
  for (std::shared_ptr<RequestState>& sync : request->syncs) {
    if (--sync->blocked_by == 0) others_.push_front(std::move(sync));
  }
  request->syncs.clear();
  FileState& file = *request->file;
  Status outcome = std::move(request->status);
  request->finish(std::move(outcome));
  if (--file.pending == 0) file.pending.notify_all();
  MutexLock lock(mutex_);
  if (--pending_ == 0) idle_.notify_all();
}

void Pump::cancel_queue() {
  while (!reads_.empty() || !others_.empty()) {
    Queue& queue = next_queue();
    std::shared_ptr<RequestState> request = std::move(queue.front());
    queue.pop_front();
    if (request->status.ok()) {
      request->status = Status::error(
          Code::kCancelled, strf("%s %s: given up, the Io is shut down",
                                 operation_name(request->operation).data(),
                                 request->file->path.c_str()));
    }
    request->issued = request->bytes;
    if (request->blocks == 0) end_request(request);
  }
}

}  // namespace zinf::io::detail
