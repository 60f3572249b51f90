// A progress bar with rate and time left, on a terminal only.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace zinf::cli {

// "writing  [#####---------]  36%  3.41 GB/s  0:02 left" on standard error.
// Draws at most ten times a second; the destructor clears the line. One thread.
class Progress {
 public:
  enum class Unit : std::uint8_t { kBytes, kSteps };

  Progress(std::string label, std::uint64_t total, Unit unit);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void set_label(std::string label);
  void update(std::uint64_t done);

 private:
  using Clock = std::chrono::steady_clock;
  std::string label_;
  const std::uint64_t total_;
  const Unit unit_;
  const bool shown_;
  const Clock::time_point begin_;
  Clock::time_point drawn_;
};

}  // namespace zinf::cli
