#include "src/tier/run_directory.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>

#include "src/base/strf.h"

namespace zinf::tier {
namespace {

// kPermission unless only this user can have put there what is in it.
Status check_ours(int directory, const std::string& path) {
  struct stat info{};
  if (fstat(directory, &info) != 0) return Status::system("stat", path, errno);
  if (info.st_uid != geteuid()) {
    return refuse(path, strf("belongs to user %u: a store needs a directory "
                             "of its own",
                             info.st_uid));
  }
  if ((info.st_mode & 022) != 0) {
    return refuse(path, "can be written by other users: chmod go-w it first");
  }
  return {};
}

Status in_use(const std::string& directory, int lock) {
  if (flock(lock, LOCK_SH | LOCK_NB) == 0) {
    return refuse(directory, "is being read by another process");
  }
  return refuse(directory, strf("is in use by process %d", pid_in(lock)));
}

// Of a directory that nothing was ever written to there is no lock.
Result<Descriptor> share_lock(int directory, const std::string& path) {
  std::string file = path + "/" + kLockName;
  ZINF_ASSIGN(Descriptor lock, open_lock(directory, path, O_RDONLY));
  if (lock.get() < 0 || flock(lock.get(), LOCK_SH | LOCK_NB) == 0) return lock;
  if (errno != EWOULDBLOCK) return Status::system("lock", file, errno);
  return in_use(path, lock.get());
}

Status write_pid(int lock, const std::string& path) {
  std::string pid = std::to_string(getpid()) + "\n";
  auto size = static_cast<off_t>(pid.size());
  errno = 0;
  if (pwrite(lock, pid.data(), pid.size(), 0) == size &&
      ftruncate(lock, size) == 0) {
    return {};
  }
  return Status::system("write", path + "/" + kLockName,
                        errno != 0 ? errno : EIO);
}

}  // namespace

Status refuse(const std::string& path, const std::string& why) {
  return Status::error(Code::kPermission, path + " " + why);
}

Result<Descriptor> open_unlinked(const std::string& path) {
  Descriptor fd(::open(path.c_str(), kDirectory | O_NOFOLLOW));
  if (fd.get() >= 0) return fd;
  int error = errno;
  struct stat info{};
  bool link = lstat(path.c_str(), &info) == 0 && S_ISLNK(info.st_mode);
  if (link) return refuse(path, "is a symbolic link: name the directory");
  return Status::system("open", path, error);
}

Result<Descriptor> open_lock(int directory, const std::string& path,
                             int flags) {
  std::string file = path + "/" + kLockName;
  Descriptor fd(openat(directory, kLockName,
                       flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600));
  if (fd.get() < 0) {
    if (errno == ENOENT) return Descriptor();
    if (errno == ELOOP) return refuse(file, "is a symbolic link");
    return Status::system("open", file, errno);
  }
  struct stat info{};
  if (fstat(fd.get(), &info) != 0) return Status::system("stat", file, errno);
  if (!S_ISREG(info.st_mode) || info.st_nlink != 1) {
    return refuse(file, "is no lock file: something else has its name");
  }
  return fd;
}

Result<Descriptor> take_lock(int directory, const std::string& path) {
  ZINF_ASSIGN(Descriptor lock, open_lock(directory, path, O_RDWR | O_CREAT));
  if (flock(lock.get(), LOCK_EX | LOCK_NB) == 0) return lock;
  if (errno == EWOULDBLOCK) return in_use(path, lock.get());
  return Status::system("lock", path + "/" + kLockName, errno);
}

int pid_in(int lock) {
  std::array<char, 32> text{};
  ssize_t got = pread(lock, text.data(), text.size() - 1, 0);
  return got > 0 ? std::atoi(text.data()) : 0;
}

Status sync_descriptor(int fd, const std::string& path) {
  // Some file systems have nothing to sync there.
  if (fsync(fd) == 0 || errno == EINVAL) return {};
  return Status::system("sync", path, errno);
}

Result<RunDirectory> RunDirectory::make(const std::string& path) {
  RunDirectory directory;
  directory.path_ = path;
  directory.made_ = mkdir(path.c_str(), 0700) == 0;
  if (!directory.made_ && errno != EEXIST) {
    return Status::system("create", path, errno);
  }
  Status status = directory.open_for_writing();
  if (status.ok()) status = directory.lock();
  if (status.ok()) return directory;
  if (directory.made_) {
    directory.remove_lock();
    rmdir(path.c_str());
  }
  return status;
}

Status RunDirectory::open_for_writing() {
  ZINF_ASSIGN(fd_, open_unlinked(path_));
  return check_ours(fd(), path_);
}

Status RunDirectory::lock() {
  ZINF_ASSIGN(lock_, take_lock(fd(), path_));
  return write_pid(lock_.get(), path_);
}

Result<RunDirectory> RunDirectory::open(const std::string& path,
                                        Access access) {
  RunDirectory directory;
  directory.path_ = path;
  if (access != Access::kWrite) {
    // One that can be entered but not listed will do.
    directory.fd_ =
        Descriptor(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (directory.fd() < 0) return Status::system("open", path, errno);
  } else {
    ZINF_TRY(directory.open_for_writing());
  }
  struct stat info{};
  if (fstatat(directory.fd(), kVolumeName, &info, 0) != 0) {
    return Status::system("open the store", volume_file(path), errno);
  }
  if (access == Access::kWrite) {
    ZINF_TRY(directory.lock());
  } else if (access == Access::kShared) {
    ZINF_ASSIGN(directory.lock_, share_lock(directory.fd(), path));
  }
  return directory;
}

Status RunDirectory::sync() const {
  ZINF_TRY(sync_descriptor(fd(), path_));
  Descriptor above(openat(fd(), "..", kDirectory));
  if (above.get() < 0) return Status::system("open", path_ + "/..", errno);
  return sync_descriptor(above.get(), path_ + "/..");
}

void RunDirectory::remove_lock() const { unlinkat(fd(), kLockName, 0); }

}  // namespace zinf::tier
