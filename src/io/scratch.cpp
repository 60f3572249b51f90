#include "src/io/scratch.h"

#include <fcntl.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <cstdlib>

#include "src/base/strf.h"
#include "zinf/bytes.h"

namespace zinf::io {
namespace {

Result<int> open_nameless(const std::string& directory) {
  int fd = open(directory.c_str(), O_RDWR | O_CLOEXEC | O_TMPFILE, 0600);
  if (fd >= 0) return fd;
  if (errno != EOPNOTSUPP && errno != EISDIR) {
    return Status::system("create a file in", directory, errno);
  }
  // A file system without O_TMPFILE: make it and take the name away.
  std::string name = directory + "/zinf-scratch-XXXXXX";
  fd = mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) return Status::system("create a file in", directory, errno);
  unlink(name.c_str());
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

Result<Scratch> Scratch::create(const std::string& directory,
                                std::uint64_t bytes) {
  ZINF_ASSIGN(int fd, open_nameless(directory));
  Scratch scratch(fd);
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
