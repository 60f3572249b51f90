// Starts a thread where the system allows another one.
#pragma once

#include <cerrno>
#include <functional>
#include <system_error>
#include <thread>

#include "zinf/status.h"

namespace zinf {

// Whether this thread is one of ours, which may not wait for a language's
// locks.
inline thread_local bool on_own_thread = false;

// The thread is started, or the error says that there can be no more.
inline Status start_thread(std::thread& thread, std::function<void()> body) {
  try {
    thread = std::thread([body = std::move(body)] {
      on_own_thread = true;
      body();
    });
    return {};
  } catch (const std::system_error& error) {
    return Status::system("start", "a thread", error.code().value());
  }
}

}  // namespace zinf
