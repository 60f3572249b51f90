// Starts a thread where the system allows another one.
#pragma once

#include <cerrno>
#include <functional>
#include <system_error>
#include <thread>

#include "zinf/status.h"

namespace zinf {

// The thread is started, or the error says that there can be no more.
inline Status start_thread(std::thread& thread, std::function<void()> body) {
  try {
    thread = std::thread(std::move(body));
    return {};
  } catch (const std::system_error& error) {
    return Status::system("start", "a thread", error.code().value());
  }
}

}  // namespace zinf
