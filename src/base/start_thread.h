// Starts a thread where the system allows another one.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "zinf/status.h"

namespace zinf {

// Whether this thread is one of ours, which may not wait for a language's
// locks.
inline thread_local bool on_own_thread = false;

// The thread is started, or the error says that there can be no more, and which
// limit to raise.
Status start_thread(std::thread& thread, std::function<void()> body);

// What limits the number of threads, and the way out, for people.
std::string thread_limit();

}  // namespace zinf
