#include "src/io/posix_driver.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/log.h"

namespace zinf::io {
namespace {

// Closes on every way out; release() keeps the descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

bool lives_in_memory(int fd) {
  struct statfs fs{};
  return fstatfs(fd, &fs) == 0 &&
         (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC);
}

// Reserves the file's blocks, so that no write ever extends it.
Status preallocate(int fd, const std::string& path, std::uint64_t bytes) {
  int error = 0;
  do {
    error = fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP) {
    log(LogLevel::kWarning,
        "io: %s: this file system cannot preallocate, writes may find the disk "
        "full later",
        path.c_str());
    error = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  }
  if (error == 0) return {};
  return Status::system(strf("reserve %s for", format_bytes(bytes).c_str()),
                        path, error);
}

Result<int> open_buffered(const std::string& path, const OpenOptions& options) {
  int flags = O_RDWR | O_CLOEXEC;
  if (options.mode == Open::kCreate) flags |= O_CREAT | O_EXCL;
  if (options.mode == Open::kReplace) flags |= O_CREAT | O_TRUNC;
  int fd = ::open(path.c_str(), flags, 0600);
  if (fd >= 0) return fd;
  const char* operation = options.mode == Open::kExisting ? "open" : "create";
  return Status::system(operation, path, errno);
}

}  // namespace

PosixDriver::~PosixDriver() {
  for (std::size_t file = 0; file < files_.size(); ++file) {
    if (files_[file].buffered >= 0) PosixDriver::close(static_cast<int>(file));
  }
}

Result<OpenedFile> PosixDriver::open(const std::string& path,
                                     const OpenOptions& options) {
  ZINF_ASSIGN(int fd, open_buffered(path, options));
  Descriptor buffered(fd);
  OpenedFile opened;
  if (options.mode == Open::kExisting) {
    struct stat info{};
    if (fstat(fd, &info) != 0) return Status::system("stat", path, errno);
    if (!S_ISREG(info.st_mode)) {
      return Status::error(Code::kInvalid, path + " is not a regular file");
    }
    opened.bytes = static_cast<std::uint64_t>(info.st_size);
  } else {
    Status reserved = preallocate(fd, path, options.bytes);
    if (!reserved.ok()) {
      unlink(path.c_str());  // it was made here, and nobody can use it
      return reserved;
    }
    opened.bytes = options.bytes;
  }

  int direct = -1;
  if (caching_ == Caching::kBuffered) {
    opened.note = "buffered I/O was asked for";
  } else if (lives_in_memory(fd)) {
    opened.note = "its file system lives in memory";
  } else {
    direct = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT);
    if (direct < 0 && errno != EINVAL) {
      return Status::system("open with O_DIRECT", path, errno);
    }
    if (direct < 0) opened.note = "its file system has no O_DIRECT";
  }
  opened.direct = direct >= 0;
  opened.file = install({buffered.release(), direct});
  return opened;
}

int PosixDriver::install(Descriptors fds) {
  for (std::size_t file = 0; file < files_.size(); ++file) {
    if (files_[file].buffered >= 0) continue;
    files_[file] = fds;
    return static_cast<int>(file);
  }
  files_.push_back(fds);
  return static_cast<int>(files_.size()) - 1;
}

void PosixDriver::close(int file) {
  Descriptors& fds = files_[static_cast<std::size_t>(file)];
  if (fds.direct >= 0) ::close(fds.direct);
  ::close(fds.buffered);
  fds = {};
}

Status PosixDriver::remove(const std::string& path) {
  if (unlink(path.c_str()) == 0) return {};
  return Status::system("remove", path, errno);
}

}  // namespace zinf::io
