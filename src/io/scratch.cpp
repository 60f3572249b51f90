#include "src/io/scratch.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <utility>

#include "src/base/strf.h"
#include "zinf/bytes.h"

namespace zinf::io {
namespace {

Result<int> open_nameless(const std::string& directory) {
  int fd = ::open(directory.c_str(), O_RDWR | O_CLOEXEC | O_TMPFILE, 0600);
  if (fd >= 0) return fd;
  if (errno == EOPNOTSUPP || errno == EISDIR) return -1;
  return Status::system("create a file in", directory, errno);
}

std::string random_digits() {
  std::random_device random;
  return strf("%08x%08x", random(), random());
}

Result<int> create_named(const std::string& path) {
  int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_CREAT | O_EXCL, 0600);
  if (fd < 0) return Status::system("create", path, errno);
  return fd;
}

Status no_room(const std::string& directory, std::uint64_t bytes,
               std::uint64_t free_bytes) {
  return Status::error(
      Code::kNoSpace,
      strf("%s has %s free, %s are needed: choose another path or a smaller "
           "size",
           directory.c_str(), format_bytes(free_bytes).c_str(),
           format_bytes(bytes).c_str()));
}

}  // namespace

std::string unfinished_suffix() {
  return std::string(kUnfinished) + "-" + random_digits();
}

Scratch::~Scratch() {
  if (fd_ >= 0) close(fd_);
  if (!name_.empty()) unlink(name_.c_str());
}

Scratch::Scratch(Scratch&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), name_(std::move(other.name_)) {
  other.name_.clear();
}

Scratch& Scratch::operator=(Scratch&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(name_, other.name_);
  return *this;
}

Result<Scratch> Scratch::open(const std::string& directory) {
  ZINF_ASSIGN(int nameless, open_nameless(directory));
  if (nameless >= 0) return Scratch(nameless);
  std::string name = directory + "/" + kScratchName + random_digits();
  ZINF_ASSIGN(int fd, create_named(name));
  unlink(name.c_str());
  return Scratch(fd);
}

Result<Scratch> Scratch::open_linkable(const std::string& directory) {
  ZINF_ASSIGN(int fd, open_nameless(directory));
  std::string name;
  if (fd < 0) {
    name = directory + "/zinf" + unfinished_suffix();
    ZINF_ASSIGN(fd, create_named(name));
  }
  Scratch scratch(fd);
  scratch.name_ = name;
  // Tells `zinf checkpoint prune` that it is in use. Without locks it works
  // too.
  (void)flock(fd, LOCK_EX | LOCK_NB);
  return scratch;
}

Status Scratch::link(int directory, const char* name,
                     const std::string& object) {
  int failed =
      name_.empty()
          ? linkat(AT_FDCWD, path().c_str(), directory, name, AT_SYMLINK_FOLLOW)
          : renameat(AT_FDCWD, name_.c_str(), directory, name);
  if (failed != 0) return Status::system("create", object, errno);
  name_.clear();
  return {};
}

Result<Scratch> Scratch::create(const std::string& directory,
                                std::uint64_t bytes) {
  ZINF_ASSIGN(Scratch scratch, open(directory));
  int fd = scratch.fd();
  struct statvfs info{};
  if (fstatvfs(fd, &info) != 0) {
    return Status::system("inspect", directory, errno);
  }
  std::uint64_t free_bytes = std::uint64_t{info.f_bavail} * info.f_frsize;
  if (bytes > free_bytes) return no_room(directory, bytes, free_bytes);
  int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (error == ENOSPC) return no_room(directory, bytes, free_bytes);
  if (error != 0) {
    return Status::system("reserve " + format_bytes(bytes) + " in", directory,
                          error);
  }
  return scratch;
}

}  // namespace zinf::io
