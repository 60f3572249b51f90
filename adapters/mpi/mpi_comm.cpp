#include "zinf/mpi_comm.h"

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <thread>
#include <utility>

#include "src/base/align.h"
#include "src/base/mutex.h"
#include "src/base/start_thread.h"
#include "src/base/strf.h"
#include "src/shard/pending.h"

namespace zinf {
namespace {

using shard::Pending;
using shard::PendingMove;

// Counts are ints: a message is cut into pieces of this size.
constexpr std::size_t kPieceBytes = kGiB;
// How long the thread sleeps between two looks, at most: requests of others may
// come at any time.
constexpr std::chrono::microseconds kLongestSleep(200);

Status mpi_error(const char* call, int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return Status::error(Code::kIo, strf("%s: %.*s", call, length, text));
}

class MpiComm final : public Comm {
 public:
  MpiComm(MPI_Comm world, int rank, int size)
      : Comm(rank, size), world_(world) {}
  ~MpiComm() override {
    close(Status::error(Code::kCancelled, "this rank has ended"));
    if (thread_.joinable()) thread_.join();
    MPI_Comm_free(&world_);
  }

  Status start() {
    return start_thread(thread_, [this] { run(); });
  }

  std::string_view backend() const override { return "mpi"; }

  void close(const Status& why) override {
    MutexLock lock(mutex_);
    if (!closed_.ok()) return;
    closed_ = why;
    wake_.notify_all();
  }

 private:
  struct Transfer {
    bool sends;
    int peer;
    int lane;
    std::span<std::byte> memory;
    std::shared_ptr<Pending> pending = std::make_shared<Pending>();
    std::vector<MPI_Request> requests = {};  // of its pieces
  };

  std::unique_ptr<Move> start_send(int to, Lane lane,
                                   std::span<const std::byte> from) override {
    return start(
        {.sends = true,
         .peer = to,
         .lane = static_cast<int>(lane),
         .memory = {const_cast<std::byte*>(from.data()), from.size()}});
  }
  std::unique_ptr<Move> start_receive(int from, Lane lane,
                                      std::span<std::byte> into) override {
    return start({.sends = false,
                  .peer = from,
                  .lane = static_cast<int>(lane),
                  .memory = into});
  }

  std::unique_ptr<Move> start(Transfer transfer) {
    std::shared_ptr<Pending> pending = transfer.pending;
    MutexLock lock(mutex_);
    if (!closed_.ok()) return finished_move(closed_);
    incoming_.push_back(std::move(transfer));
    wake_.notify_all();
    return std::make_unique<PendingMove>(std::move(pending));
  }

  // The thread that makes all calls.
  void run() {
    std::chrono::microseconds sleep(0);
    while (take_incoming(sleep)) {
      sleep = advance() ? std::chrono::microseconds(0)
                        : std::min(kLongestSleep,
                                   2 * sleep + std::chrono::microseconds(1));
    }
    give_up();
  }

  // Sleeps before it, or until there is something to do. False: the end.
  bool take_incoming(std::chrono::microseconds sleep) {
    std::deque<Transfer> taken;
    {
      MutexLock lock(mutex_);
      while (incoming_.empty() && active_.empty() && closed_.ok()) {
        wake_.wait(mutex_);
      }
      if (incoming_.empty() && closed_.ok() && sleep.count() > 0) {
        wake_.wait_for(mutex_, sleep);
      }
      if (!closed_.ok()) return false;
      taken.swap(incoming_);
    }
    for (Transfer& transfer : taken) begin(std::move(transfer));
    return true;
  }

  void begin(Transfer transfer) {
    std::size_t at = 0;
    do {
      const std::size_t bytes =
          std::min(kPieceBytes, transfer.memory.size() - at);
      std::byte* data = transfer.memory.data() + at;
      const int count = static_cast<int>(bytes);
      transfer.requests.push_back(MPI_REQUEST_NULL);
      MPI_Request* request = &transfer.requests.back();
      const int code = transfer.sends
                           ? MPI_Isend(data, count, MPI_BYTE, transfer.peer,
                                       transfer.lane, world_, request)
                           : MPI_Irecv(data, count, MPI_BYTE, transfer.peer,
                                       transfer.lane, world_, request);
      if (code != MPI_SUCCESS) {
        transfer.pending->finish(
            mpi_error(transfer.sends ? "MPI_Isend" : "MPI_Irecv", code));
        return;
      }
      at += bytes;
    } while (at < transfer.memory.size());
    active_.push_back(std::move(transfer));
  }

  // Whether something has ended.
  bool advance() {
    return std::erase_if(active_, [this](Transfer& transfer) {
             int all = 0;
             const int code = MPI_Testall(
                 static_cast<int>(transfer.requests.size()),
                 transfer.requests.data(), &all, MPI_STATUSES_IGNORE);
             if (code == MPI_SUCCESS && all == 0) return false;
             transfer.pending->finish(code == MPI_SUCCESS
                                          ? Status()
                                          : mpi_error("MPI_Testall", code));
             return true;
           }) > 0;
  }

  // The memory of sends may still be looked at: who closes a group ends.
  void give_up() {
    for (Transfer& transfer : active_) {
      for (MPI_Request& request : transfer.requests) {
        if (request == MPI_REQUEST_NULL) continue;
        MPI_Cancel(&request);
        MPI_Request_free(&request);
      }
    }
    std::deque<Transfer> left;
    Status why;
    {
      MutexLock lock(mutex_);
      left.swap(incoming_);
      why = closed_;
    }
    for (Transfer& transfer : active_) transfer.pending->finish(why);
    for (Transfer& transfer : left) transfer.pending->finish(why);
    active_.clear();
  }

  MPI_Comm world_;
  std::thread thread_;
  std::deque<Transfer> active_;  // the thread only
  Mutex mutex_;
  CondVar wake_;
  std::deque<Transfer> incoming_ ZINF_GUARDED_BY(mutex_);
  Status closed_ ZINF_GUARDED_BY(mutex_);
};

Status start_mpi() {
  int running = 0;
  int level = MPI_THREAD_SINGLE;
  MPI_Initialized(&running);
  if (running == 0) {
    const int code =
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
    if (code != MPI_SUCCESS) return mpi_error("MPI_Init_thread", code);
    std::atexit([] { MPI_Finalize(); });
  } else {
    MPI_Query_thread(&level);
  }
  if (level >= MPI_THREAD_SERIALIZED) return {};
  return Status::error(
      Code::kUnsupported,
      "MPI was started without threads: call MPI_Init_thread with "
      "MPI_THREAD_SERIALIZED or more, or let zinf start it");
}

}  // namespace

Result<std::unique_ptr<Comm>> make_mpi_group() {
  ZINF_TRY(start_mpi());
  MPI_Comm world = MPI_COMM_NULL;
  int code = MPI_Comm_dup(MPI_COMM_WORLD, &world);
  if (code != MPI_SUCCESS) return mpi_error("MPI_Comm_dup", code);
  MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &size);
  auto comm = std::make_unique<MpiComm>(world, rank, size);
  ZINF_TRY(comm->start());
  return std::unique_ptr<Comm>(std::move(comm));
}

}  // namespace zinf
