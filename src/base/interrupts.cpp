#include "src/base/interrupts.h"

#include <unistd.h>
#include <csignal>

#include <atomic>
#include <cerrno>

#include "src/base/mutex.h"

namespace zinf {
namespace {

// What a SIGINT does now.
enum class Mode : int {
  kOpen,    // it is passed on
  kHold,    // it waits
  kHeld,    // one waits, the next is passed on
  kPassed,  // as kOpen, until the hold is over
};

// Read by the handler: lock-free all of them.
std::atomic<Mode> mode = Mode::kOpen;
std::atomic<std::uint32_t> interrupts = 0;
std::atomic<pid_t> process = 0;
std::atomic<void (*)(int)> next_handler = SIG_DFL;
std::atomic<void (*)(int, siginfo_t*, void*)> next_with_info = nullptr;

std::atomic<void (*)()> check = nullptr;

struct Users {
  Mutex mutex;
  int holds ZINF_GUARDED_BY(mutex) = 0;
  int all ZINF_GUARDED_BY(mutex) = 0;  // holds and watches
  struct sigaction before{};
};

Users& users() {
  static auto* all = new Users();
  return *all;
}

void pass_on(int signal, siginfo_t* info, void* context) {
  if (auto* with_info = next_with_info.load()) {
    return with_info(signal, info, context);
  }
  void (*handler)(int) = next_handler;
  if (handler == SIG_IGN) return;
  if (handler != SIG_DFL) return handler(signal);
  struct sigaction standard{};
  standard.sa_handler = SIG_DFL;
  sigaction(signal, &standard, nullptr);
  kill(getpid(), signal);  // when this handler has returned
}

bool waits() {
  if (getpid() != process) return false;  // a child of fork() holds nothing
  Mode now = Mode::kHold;
  if (mode.compare_exchange_strong(now, Mode::kHeld)) return true;
  now = Mode::kHeld;
  mode.compare_exchange_strong(now, Mode::kPassed);
  return false;
}

void on_interrupt(int signal, siginfo_t* info, void* context) {
  int error = errno;
  interrupts.fetch_add(1);
  if (!waits()) pass_on(signal, info, context);
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 &&
         action.sa_sigaction == &on_interrupt;
}

void install(Users& all) ZINF_REQUIRES(all.mutex) {
  struct sigaction now{};
  sigaction(SIGINT, nullptr, &now);
  bool with_info = (now.sa_flags & SA_SIGINFO) != 0;
  if (is_ours(now) || (!with_info && now.sa_handler == SIG_IGN)) return;
  all.before = now;
  next_with_info = with_info ? now.sa_sigaction : nullptr;
  next_handler = with_info ? SIG_DFL : now.sa_handler;
  process = getpid();
  // Whether system calls go on is up to the handler that was there.
  now.sa_flags |= SA_SIGINFO;
  now.sa_flags &= ~static_cast<int>(SA_RESETHAND);
  now.sa_sigaction = &on_interrupt;
  sigaction(SIGINT, &now, nullptr);
}

void begin_use(Users& all) ZINF_REQUIRES(all.mutex) {
  ++all.all;
  install(all);
}

void end_use(Users& all) ZINF_REQUIRES(all.mutex) {
  if (--all.all > 0) return;
  struct sigaction now{};
  sigaction(SIGINT, nullptr, &now);
  if (is_ours(now)) sigaction(SIGINT, &all.before, nullptr);
}

}  // namespace

HoldInterrupts::HoldInterrupts() {
  {
    Users& all = users();
    MutexLock lock(all.mutex);
    if (all.holds++ == 0) mode = Mode::kHold;
    begin_use(all);
  }
  try {
    if (auto* due = check.load()) due();
  } catch (...) {
    end();
    throw;
  }
}

void HoldInterrupts::end() {
  if (ended_) return;
  ended_ = true;
  bool waited = false;
  {
    Users& all = users();
    MutexLock lock(all.mutex);
    if (--all.holds == 0) waited = mode.exchange(Mode::kOpen) == Mode::kHeld;
    end_use(all);
  }
  if (waited) kill(getpid(), SIGINT);
}

WatchInterrupts::WatchInterrupts() {
  Users& all = users();
  MutexLock lock(all.mutex);
  begin_use(all);
  before_ = interrupts;
}

WatchInterrupts::~WatchInterrupts() {
  Users& all = users();
  MutexLock lock(all.mutex);
  end_use(all);
}

void WatchInterrupts::restart() {
  Users& all = users();
  MutexLock lock(all.mutex);
  install(all);
  before_ = interrupts;
}

bool WatchInterrupts::seen() const { return interrupts != before_; }

void set_interrupt_check(void (*due)()) { check = due; }

}  // namespace zinf
