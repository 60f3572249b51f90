#include "src/io/posix_driver.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
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
  NewOrOld(const std::string& path, const OpenOptions& options)
      : path_(path),
        directory_(options.directory >= 0 ? options.directory : AT_FDCWD) {
    Open mode = options.mode;
    if (creates(mode)) {
      open(O_RDWR | O_CREAT | O_EXCL);
      made_ = fd_ >= 0;
    }
    if (mode == Open::kReadOnly) {
      open(O_RDONLY);
    } else if (mode == Open::kExisting ||
               (mode == Open::kReplace && fd_ < 0 && error_ == EEXIST)) {
      open(O_RDWR | (options.directory >= 0 ? O_NOFOLLOW : 0));
    }
  }
  ~NewOrOld() {
    if (fd_ < 0) return;
    ::close(fd_);
    if (made_) unlinkat(directory_, path_.c_str(), 0);
  }
  NewOrOld(const NewOrOld&) = delete;
  NewOrOld& operator=(const NewOrOld&) = delete;

  int fd() const { return fd_; }
  int error() const { return error_; }
  int keep() { return std::exchange(fd_, -1); }

 private:
  // Never waits, as for a pipe in the file's place.
  void open(int flags) {
    fd_ =
        openat(directory_, path_.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0600);
    error_ = fd_ >= 0 ? 0 : errno;
    if (fd_ >= 0) (void)fcntl(fd_, F_SETFL, 0);  // transfers may wait
  }

  const std::string& path_;
  const int directory_;
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
  if (!creates(options.mode)) {
    return static_cast<std::uint64_t>(info.st_size);
  }
  if (ftruncate(fd, 0) != 0) return Status::system("empty", path, errno);
  ZINF_TRY(preallocate(fd, path, 0, options.bytes));
  return options.bytes;
}

// A second, direct descriptor of the same file; -1 where its file system opens
// it but does not move a page that way.
Result<int> open_direct(int fd, const std::string& path, std::uint64_t bytes,
                        Open mode) {
  std::string same = "/proc/self/fd/" + std::to_string(fd);
  int flags = mode == Open::kReadOnly ? O_RDONLY : O_RDWR;
  int direct = ::open(same.c_str(), flags | O_CLOEXEC | O_DIRECT);
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
  NewOrOld file(path, options);
  const std::string& name = options.name.empty() ? path : options.name;
  if (file.fd() < 0) {
    const char* operation = creates(options.mode) ? "create" : "open";
    return Status::system(operation, name, file.error());
  }
  OpenedFile opened;
  ZINF_ASSIGN(opened.bytes, set_size(file.fd(), name, options));
  int direct = -1;
  if (caching_ == Caching::kBuffered) {
    opened.note = "buffered I/O was asked for";
  } else if (lives_in_memory(file.fd())) {
    opened.note = "its file system lives in memory";
  } else {
    ZINF_ASSIGN(direct,
                open_direct(file.fd(), name, opened.bytes, options.mode));
    if (direct < 0) opened.note = "its file system has no O_DIRECT";
  }
  opened.direct = direct >= 0;
  opened.file = install({file.keep(), direct});
  return opened;
}

std::int64_t PosixDriver::carry_out(const RawOp& op, int fd) {
  auto offset = static_cast<off_t>(op.offset);
  iovec whole = {op.data, op.bytes};
  const iovec* pieces = op.pieces.empty() ? &whole : op.pieces.data();
  auto count = static_cast<int>(std::max<std::size_t>(op.pieces.size(), 1));
  ssize_t result = -1;
  switch (op.kind) {
    case Operation::kRead:
      result = preadv(fd, pieces, count, offset);
      break;
    case Operation::kWrite:
      result = pwritev(fd, pieces, count, offset);
      break;
    case Operation::kSync:
      result = fdatasync(fd);
      break;
    case Operation::kResize:
    case Operation::kCreate:
      break;  // never in flight
  }
  return result >= 0 ? result : -errno;
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
