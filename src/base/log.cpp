#include "zinf/log.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>

#include "src/base/strf.h"

namespace zinf {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"debug", "info", "warning",
                                                    "error", "off"};

LogLevel level_from_environment() {
  const char* text = std::getenv("ZINF_LOG");
  for (std::size_t i = 0; text != nullptr && i < kNames.size(); ++i) {
    if (text == kNames[i]) return static_cast<LogLevel>(i);
  }
  return LogLevel::kWarning;
}

int rank_from_environment() {
  const char* text = std::getenv("RANK");
  return text != nullptr ? std::atoi(text) : -1;
}

// Process-wide on purpose, like the standard error that it describes.
std::atomic<LogLevel>& level_setting() {
  static std::atomic<LogLevel> level = level_from_environment();
  return level;
}

std::atomic<int>& rank_setting() {
  static std::atomic<int> rank = rank_from_environment();
  return rank;
}

double seconds_since_start() {
  using Clock = std::chrono::steady_clock;
  static const Clock::time_point start = Clock::now();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

void set_log_level(LogLevel level) { level_setting() = level; }
LogLevel log_level() { return level_setting(); }
void set_log_rank(int rank) { rank_setting() = rank; }

void log(LogLevel level, const char* format, ...) {
  if (level < log_level() || level == LogLevel::kOff) return;
  std::va_list args;
  va_start(args, format);
  std::string text = vstrf(format, args);
  va_end(args);
  int rank = rank_setting();
  std::string line = strf("zinf %.3f ", seconds_since_start()) +
                     (rank >= 0 ? strf("rank %d ", rank) : "") +
                     std::string(kNames[static_cast<std::size_t>(level)]) +
                     ": " + text + "\n";
  // Nothing can be done about a standard error that does not take the line.
  [[maybe_unused]] ssize_t written =
      write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace zinf
