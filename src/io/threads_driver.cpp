// pread and pwrite on a few threads: for systems that forbid io_uring.
#include <pthread.h>

#include <deque>
#include <thread>

#include "src/base/mutex.h"
#include "src/base/start_thread.h"
#include "src/base/strf.h"
#include "src/io/completions.h"
#include "src/io/posix_driver.h"

namespace zinf::io {
namespace {

class ThreadsDriver final : public PosixDriver {
 public:
  explicit ThreadsDriver(const Options& options)
      : PosixDriver(options.caching), num_threads_(options.threads) {}

  ~ThreadsDriver() override {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Status begin() override {
    for (int i = 0; i < num_threads_; ++i) {
      std::thread thread;
      ZINF_TRY(start_thread(thread, [this] { work(); }));
      pthread_setname_np(thread.native_handle(), "zinf-io-worker");
      threads_.push_back(std::move(thread));
    }
    return {};
  }

  std::string description() const override {
    return strf("pread/pwrite on %d threads", num_threads_);
  }

  void start(RawOp* op) override {
    {
      MutexLock lock(mutex_);
      waiting_.push_back({op, descriptor(*op)});
    }
    ready_.notify_one();
  }

  void collect(std::vector<RawOp*>& finished,
               std::chrono::nanoseconds timeout) override {
    completions_.collect(finished, timeout);
  }

  void wake() override { completions_.wake(); }

 private:
  struct Job {
    RawOp* op;
    int fd;
  };

  void work() {
    while (true) {
      Job job{};
      {
        MutexLock lock(mutex_);
        while (waiting_.empty() && !stopping_) ready_.wait(mutex_);
        if (waiting_.empty()) return;
        job = waiting_.front();
        waiting_.pop_front();
      }
      job.op->result = carry_out(*job.op, job.fd);
      completions_.add(job.op);
    }
  }

  const int num_threads_;
  std::vector<std::thread> threads_;  // changed by begin() and the destructor
  Completions completions_;           // its own synchronisation

  Mutex mutex_;
  CondVar ready_;
  std::deque<Job> waiting_ ZINF_GUARDED_BY(mutex_);
  bool stopping_ ZINF_GUARDED_BY(mutex_) = false;
};

}  // namespace

std::unique_ptr<Driver> make_threads_driver(const Options& options) {
  return std::make_unique<ThreadsDriver>(options);
}

}  // namespace zinf::io
