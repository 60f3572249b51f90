// What the io_uring and the thread driver share: files of the file system.
#pragma once

#include <string>
#include <vector>

#include "src/io/driver.h"

namespace zinf::io {

class PosixDriver : public Driver {
 public:
  explicit PosixDriver(Caching caching) : caching_(caching) {}
  ~PosixDriver() override;

  Result<OpenedFile> open(const std::string& path,
                          const OpenOptions& options) override;
  void close(int file) override;
  Status remove(const std::string& path) override;
  Status resize(int file, const std::string& path, std::uint64_t from,
                std::uint64_t to) override;

 protected:
  // Two descriptors for one file: aligned transfers take the direct one, the
  // rest the buffered one. The kernel keeps both views coherent as long as no
  // page is under a direct and a buffered transfer at once.
  struct Descriptors {
    int buffered = -1;
    int direct = -1;  // -1: none
  };

  int descriptor(const RawOp& op) const {
    const Descriptors& fds = files_[static_cast<std::size_t>(op.file)];
    return op.direct ? fds.direct : fds.buffered;
  }
  // With one system call, which waits: bytes moved, or -errno.
  static std::int64_t carry_out(const RawOp& op, int fd);
  const Descriptors& descriptors(int file) const {
    return files_[static_cast<std::size_t>(file)];
  }

 private:
  int install(Descriptors fds);

  const Caching caching_;
  std::vector<Descriptors> files_;  // closed ones are reused
};

}  // namespace zinf::io
