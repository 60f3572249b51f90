#include "zinf/thread_pool.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "src/base/check.h"
#include "src/base/mutex.h"
#include "src/base/start_thread.h"
#include "src/base/strf.h"

namespace zinf {
namespace {

// More than one, so that a thread which the system took away for a while does
// not hold up the others.
constexpr std::size_t kPiecesPerThread = 16;

}  // namespace

// A job is a number of pieces; the caller and the workers take the next piece
// until none is left. The job lives on the caller's stack: run() returns only
// when no worker holds a piece of it.
class ThreadPool::Impl {
 public:
  using Body = std::function<void(std::size_t, std::size_t)>;

  Status start(int threads) {
    for (int i = 1; i < threads; ++i) {
      std::thread worker;
      ZINF_TRY(start_thread(worker, [this] { work(); }));
      workers_.push_back(std::move(worker));
    }
    return {};
  }

  ~Impl() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  void run(std::size_t count, std::size_t grain, const Body& body) {
    ZINF_CHECK(grain > 0, "a grain of zero");
    if (count == 0) return;
    std::size_t grains = (count + grain - 1) / grain;
    auto pieces = static_cast<std::size_t>(threads()) * kPiecesPerThread;
    std::size_t per_piece = (grains + pieces - 1) / pieces;
    std::size_t piece = per_piece * grain;
    if (workers_.empty() || piece >= count) {
      body(0, count);
      return;
    }
    MutexLock turn(turn_);
    {
      MutexLock lock(mutex_);
      job_ = {&body, count, piece, 0, 0};
    }
    wake_.notify_all();
    while (take_piece()) {
    }
    MutexLock lock(mutex_);
    while (job_.running > 0) idle_.wait(mutex_);
    job_ = {};
  }

 private:
  struct Job {
    const Body* body = nullptr;
    std::size_t count = 0;
    std::size_t piece = 0;
    std::size_t next = 0;  // where the next piece begins
    int running = 0;       // pieces taken and not finished
  };

  // Runs one piece of the current job; false when none is left.
  bool take_piece() ZINF_EXCLUDES(mutex_) {
    const Body* body = nullptr;
    std::size_t begin = 0;
    std::size_t end = 0;
    {
      MutexLock lock(mutex_);
      if (job_.next >= job_.count) return false;
      begin = job_.next;
      end = std::min(job_.count, begin + job_.piece);
      job_.next = end;
      ++job_.running;
      body = job_.body;
    }
    (*body)(begin, end);
    MutexLock lock(mutex_);
    if (--job_.running == 0) idle_.notify_one();
    return true;
  }

  void work() {
    while (true) {
      {
        MutexLock lock(mutex_);
        while (!stopping_ && job_.next >= job_.count) wake_.wait(mutex_);
        if (stopping_) return;
      }
      take_piece();
    }
  }

  std::vector<std::thread> workers_;  // const after start()

  Mutex turn_;  // held by the caller whose job is running

  Mutex mutex_;
  CondVar wake_;
  CondVar idle_;
  bool stopping_ ZINF_GUARDED_BY(mutex_) = false;
  Job job_ ZINF_GUARDED_BY(mutex_);
};

Result<std::unique_ptr<ThreadPool>> ThreadPool::create(int threads) {
  if (threads < 1) {
    return Status::error(Code::kInvalid,
                         strf("threads is %d, must be at least 1", threads));
  }
  auto impl = std::make_unique<Impl>();
  ZINF_TRY(impl->start(threads));
  return std::unique_ptr<ThreadPool>(new ThreadPool(std::move(impl)));
}

ThreadPool::ThreadPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ThreadPool::~ThreadPool() = default;
int ThreadPool::threads() const { return impl_->threads(); }

void ThreadPool::run(
    std::size_t count, std::size_t grain,
    const std::function<void(std::size_t, std::size_t)>& body) {
  impl_->run(count, grain, body);
}

}  // namespace zinf
