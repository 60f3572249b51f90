// A file without a name: it is gone when its descriptor is closed, also after a
// kill, unless link() has given it one.
#pragma once

#include <cstdint>
#include <string>

#include "zinf/status.h"

namespace zinf::io {

// Move-only.
class Scratch {
 public:
  // In `directory`, empty; for open_linkable() link() works. A file system
  // without O_TMPFILE: open() makes a file and takes its name away at once,
  // open_linkable() locks it and takes it away in the end (a kill leaves it).
  static Result<Scratch> open(const std::string& directory);
  static Result<Scratch> open_linkable(const std::string& directory);
  // As open(), `bytes` long and reserved on the disk.
  static Result<Scratch> create(const std::string& directory,
                                std::uint64_t bytes);

  ~Scratch();
  Scratch(Scratch&& other) noexcept;
  Scratch& operator=(Scratch&& other) noexcept;

  // Under which this process can open it again.
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }
  int fd() const { return fd_; }

  // Gives it a name in the directory of this descriptor; `object` is the path
  // for messages. Nothing is synced.
  Status link(int directory, const char* name, const std::string& object);

 private:
  explicit Scratch(int fd) : fd_(fd) {}
  int fd_;
  std::string name_;  // while it must have one; else empty
};

// Ends of the names of what is not whole yet.
inline constexpr const char* kUnfinished = ".unfinished";
inline constexpr const char* kScratchName = "zinf-scratch-";

// ".unfinished-" and 16 hexadecimal digits that cannot be guessed.
std::string unfinished_suffix();

}  // namespace zinf::io
