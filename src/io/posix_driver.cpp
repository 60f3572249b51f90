#include "src/io/posix_driver.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/log.h"

namespace zinf::io {
namespace {

bool lives_in_memory(int fd) {
  struct statfs fs{};
  return fstatfs(fd, &fs) == 0 &&
         (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC);
}

// Reserves blocks for [from, bytes), so that no write ever extends the file.
Status preallocate(int fd, const std::string& path, std::uint64_t from,
                   std::uint64_t bytes) {
  int error = 0;
  do {
    error = fallocate(fd, 0, static_cast<off_t>(from),
                      static_cast<off_t>(bytes - from)) == 0
                ? 0
                : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP) {
    log(LogLevel::kWarning,
        "io: %s: this file system cannot preallocate, writes may find the disk "
        "full later",
        path.c_str());
    error = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  }
  if (error == 0) return {};
  return Status::system(
      strf("reserve %s for", format_bytes(bytes - from).c_str()), path, error);
}

// Opens the path; what it makes, it takes away again unless keep() is called.
class NewOrOld {
 public:
  NewOrOld(const std::string& path, Open mode) : path_(path) {
    if (mode != Open::kExisting) {
      fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_CREAT | O_EXCL, 0600);
      made_ = fd_ >= 0;
    }
    bool old = mode == Open::kExisting ||
               (mode == Open::kReplace && fd_ < 0 && errno == EEXIST);
    if (old) fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    error_ = fd_ >= 0 ? 0 : errno;
  }
  ~NewOrOld() {
    if (fd_ < 0) return;
    ::close(fd_);
    if (made_) unlink(path_.c_str());
  }
  NewOrOld(const NewOrOld&) = delete;
  NewOrOld& operator=(const NewOrOld&) = delete;

  int fd() const { return fd_; }
  int error() const { return error_; }
  int keep() { return std::exchange(fd_, -1); }

 private:
  const std::string& path_;
  int fd_ = -1;
  int error_ = 0;
  bool made_ = false;
};

// The size of the file after this; `bytes` is taken in the modes that set it.
Result<std::uint64_t> set_size(int fd, const std::string& path,
                               const OpenOptions& options) {
  struct stat info{};
  if (fstat(fd, &info) != 0) return Status::system("stat", path, errno);
  if (!S_ISREG(info.st_mode)) {
    return Status::error(Code::kInvalid, path + " is not a regular file");
  }
  if (options.mode == Open::kExisting) {
    return static_cast<std::uint64_t>(info.st_size);
  }
  if (ftruncate(fd, 0) != 0) return Status::system("empty", path, errno);
  ZINF_TRY(preallocate(fd, path, 0, options.bytes));
  return options.bytes;
}

// A second, direct descriptor of the same file; -1 where its file system opens
// it but does not move a page that way.
Result<int> open_direct(int fd, const std::string& path, std::uint64_t bytes) {
  std::string same = "/proc/self/fd/" + std::to_string(fd);
  int direct = ::open(same.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT);
  if (direct < 0) {
    if (errno == EINVAL) return -1;
    return Status::system("open with O_DIRECT", path, errno);
  }
  if (bytes < File::kAlignment) return direct;
  alignas(File::kAlignment) std::array<std::byte, File::kAlignment> page;
  if (pread(direct, page.data(), page.size(), 0) < 0 && errno == EINVAL) {
    ::close(direct);
    return -1;
  }
  return direct;
}

}  // namespace

PosixDriver::~PosixDriver() {
  for (std::size_t file = 0; file < files_.size(); ++file) {
    if (files_[file].buffered >= 0) PosixDriver::close(static_cast<int>(file));
  }
}

Result<OpenedFile> PosixDriver::open(const std::string& path,
                                     const OpenOptions& options) {
  NewOrOld file(path, options.mode);
  if (file.fd() < 0) {
    const char* operation = options.mode == Open::kExisting ? "open" : "create";
    return Status::system(operation, path, file.error());
  }
  OpenedFile opened;
  ZINF_ASSIGN(opened.bytes, set_size(file.fd(), path, options));
  int direct = -1;
  if (caching_ == Caching::kBuffered) {
    opened.note = "buffered I/O was asked for";
  } else if (lives_in_memory(file.fd())) {
    opened.note = "its file system lives in memory";
  } else {
    ZINF_ASSIGN(direct, open_direct(file.fd(), path, opened.bytes));
    if (direct < 0) opened.note = "its file system has no O_DIRECT";
  }
  opened.direct = direct >= 0;
  opened.file = install({file.keep(), direct});
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

Status PosixDriver::resize(int file, const std::string& path,
                           std::uint64_t from, std::uint64_t to) {
  int fd = descriptors(file).buffered;
  auto cut = [&](std::uint64_t bytes) {
    return ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  };
  if (to <= from) {
    int error = cut(to);
    return error == 0 ? Status() : Status::system("cut", path, error);
  }
  Status status = preallocate(fd, path, from, to);
  // A disk that is full may have given a part of it.
  if (!status.ok()) (void)cut(from);
  return status;
}

}  // namespace zinf::io
