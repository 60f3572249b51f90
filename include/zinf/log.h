// One line of log to standard error: "zinf 12.345 rank 1 warning: text".
//
// Plain on purpose: it may be included beside torch's headers. Thread-safe; a
// line is written by one system call.
#pragma once

#include <cstdint>

namespace zinf {

enum class LogLevel : std::uint8_t { kDebug, kInfo, kWarning, kError, kOff };

// Lines below the level are dropped. The start value is kWarning, or what the
// environment variable ZINF_LOG says (debug, info, warning, error, off).
void set_log_level(LogLevel level);
LogLevel log_level();

// The rank shown in every line; none is shown when negative. The start value is
// the environment variable RANK where there is one.
void set_log_rank(int rank);

[[gnu::format(printf, 2, 3)]] void log(LogLevel level, const char* format, ...);

}  // namespace zinf
