// Ctrl-C (SIGINT) at moments when an exception would leave work half done.
//
// Both classes put a handler of their own before the one that is installed, and
// take it away with the last of them; a handler that was installed meanwhile
// stays. An ignored SIGINT stays ignored.
#pragma once

#include <cstdint>

namespace zinf {

// While one exists, in whatever thread, SIGINT waits: it reaches the process's
// handler when the last of them ends. A second one reaches it at once, so that
// a hang can be ended. Thread-safe.
class HoldInterrupts {
 public:
  // Throws what the check (see below) throws.
  HoldInterrupts();
  ~HoldInterrupts() { end(); }
  HoldInterrupts(const HoldInterrupts&) = delete;
  HoldInterrupts& operator=(const HoldInterrupts&) = delete;

  void end();

 private:
  bool ended_ = false;
};

// Notes SIGINT while it exists, held or not, and passes it on. Thread-safe.
class WatchInterrupts {
 public:
  WatchInterrupts();
  ~WatchInterrupts();
  WatchInterrupts(const WatchInterrupts&) = delete;
  WatchInterrupts& operator=(const WatchInterrupts&) = delete;

  void restart();     // as a new one
  bool seen() const;  // one, since then

 private:
  std::uint32_t before_;
};

// A language that handles a signal later than the system: it is called when a
// hold begins, and throws what is due for a SIGINT from before.
void set_interrupt_check(void (*check)());

}  // namespace zinf
