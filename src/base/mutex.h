// std::mutex with clang's thread-safety annotations (checked by `make lint`).
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define ZINF_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define ZINF_THREAD_ANNOTATION(x)
#endif
#define ZINF_GUARDED_BY(mutex) ZINF_THREAD_ANNOTATION(guarded_by(mutex))
#define ZINF_REQUIRES(...) \
  ZINF_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define ZINF_EXCLUDES(...) ZINF_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

namespace zinf {

class ZINF_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  void lock() ZINF_THREAD_ANNOTATION(acquire_capability()) { mutex_.lock(); }
  void unlock() ZINF_THREAD_ANNOTATION(release_capability()) {
    mutex_.unlock();
  }
  bool try_lock() ZINF_THREAD_ANNOTATION(try_acquire_capability(true)) {
    return mutex_.try_lock();
  }

 private:
  std::mutex mutex_;
};

// Holds a Mutex for its scope.
class ZINF_THREAD_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex)
      ZINF_THREAD_ANNOTATION(acquire_capability(mutex))
      : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() ZINF_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits inside a loop over the condition: while (!ready) cv.wait(mutex_);
class CondVar {
 public:
  void wait(Mutex& mutex) ZINF_REQUIRES(mutex) { cv_.wait(mutex); }

  // False when the time ran out first.
  bool wait_for(Mutex& mutex, std::chrono::nanoseconds timeout)
      ZINF_REQUIRES(mutex) {
    return cv_.wait_for(mutex, timeout) == std::cv_status::no_timeout;
  }

  void notify_one() { cv_.notify_one(); }
  void notify_all() { cv_.notify_all(); }

 private:
  std::condition_variable_any cv_;
};

}  // namespace zinf
