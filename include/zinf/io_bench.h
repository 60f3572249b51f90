// Measures how fast a path moves data through an Io, beside a plain loop of
// pread and pwrite that uses none of zinf's code: the ceiling.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "zinf/io.h"
#include "zinf/status.h"

namespace zinf::io {

enum class Direction : std::uint8_t { kRead, kWrite, kMix };

struct Sample {
  double seconds = 0;
  double cpu_seconds = 0;  // user and system, of the whole process
  std::uint64_t bytes = 0;

  double gbps() const { return static_cast<double>(bytes) / seconds / 1e9; }
};

// One at a time.
class Bench {
 public:
  // `path` is a directory: measures on a nameless file in it, which is gone
  // afterwards whatever happens.
  static Result<Bench> in_directory(const std::string& path,
                                    std::uint64_t bytes);
  // `path` is a file, whose content is lost.
  static Result<Bench> on_file(const std::string& path);

  ~Bench();
  Bench(Bench&& other) noexcept;
  Bench& operator=(Bench&& other) noexcept;

  // Called with the bytes moved so far in the call that runs.
  using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;
  void set_progress(Progress progress);

  // Opens the file with these options and writes it once, so that it has
  // content and its blocks are real.
  Status open(const Options& options);
  const Io& io() const;
  bool direct() const;

  // Moves the whole file once through the Io. kMix reads one half while it
  // writes the other.
  Result<Sample> run(Direction direction);

  // The same by pread and pwrite on `threads` threads.
  Result<Sample> run_plain(Direction direction, int threads);

  // Reads the whole file and compares every byte with what was written last.
  Status verify();

 private:
  class Impl;
  explicit Bench(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zinf::io
