// A file without a name: it is gone when its descriptor is closed, also after a
// kill.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

#include "zinf/status.h"

namespace zinf::io {

class Scratch {
 public:
  // In `directory`, `bytes` long and reserved on the disk.
  static Result<Scratch> create(const std::string& directory,
                                std::uint64_t bytes);

  ~Scratch() {
    if (fd_ >= 0) close(fd_);
  }
  Scratch(Scratch&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  // Under which this process can open it again.
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }
  int fd() const { return fd_; }

 private:
  explicit Scratch(int fd) : fd_(fd) {}
  int fd_;
};

}  // namespace zinf::io
