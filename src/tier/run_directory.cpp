#include "src/tier/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "src/base/strf.h"
#include "src/tier/format.h"
#include "zinf/store.h"

namespace zinf {
namespace tier {
namespace {

std::string lock_file(const std::string& directory) {
  return directory + "/" + kLockName;
}

int pid_in(int fd) {
  std::array<char, 32> text{};
  ssize_t got = pread(fd, text.data(), text.size() - 1, 0);
  return got > 0 ? std::atoi(text.data()) : 0;
}

}  // namespace

DirectoryLock::~DirectoryLock() {
  if (fd_ >= 0) ::close(fd_);
}

DirectoryLock::DirectoryLock(DirectoryLock&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}

DirectoryLock& DirectoryLock::operator=(DirectoryLock&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Result<DirectoryLock> DirectoryLock::take(const std::string& directory) {
  std::string path = lock_file(directory);
  int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return Status::system("open", path, errno);
  DirectoryLock lock(fd);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return Status::system("lock", path, errno);
    return Status::error(
        Code::kPermission,
        strf("%s is in use by process %d", directory.c_str(), pid_in(fd)));
  }
  std::string pid = std::to_string(getpid()) + "\n";
  auto size = static_cast<off_t>(pid.size());
  if (pwrite(fd, pid.data(), pid.size(), 0) != size ||
      ftruncate(fd, size) != 0) {
    return Status::system("write", path, errno != 0 ? errno : EIO);
  }
  return lock;
}

int lock_owner(const std::string& directory) {
  int fd = ::open(lock_file(directory).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  int owner = 0;
  if (flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    owner = std::max(pid_in(fd), 1);  // somebody has it, whatever it says
  }
  ::close(fd);
  return owner;
}

Result<bool> make_directory(const std::string& directory) {
  if (mkdir(directory.c_str(), 0700) == 0) return true;
  if (errno != EEXIST) return Status::system("create", directory, errno);
  struct stat info{};
  if (stat(directory.c_str(), &info) != 0) {
    return Status::system("stat", directory, errno);
  }
  if (S_ISDIR(info.st_mode)) return false;
  return Status::system("create", directory, ENOTDIR);
}

Status sync_directory(const std::string& directory) {
  int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return Status::system("open", directory, errno);
  int error = fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  // Some file systems have nothing to sync there.
  if (error == 0 || error == EINVAL) return {};
  return Status::system("sync", directory, error);
}

}  // namespace tier

namespace {

constexpr int kDepth = 4;  // run directories are not hidden deeper

FoundStore describe(const std::string& path) {
  FoundStore found;
  found.path = path;
  found.owner = tier::lock_owner(path);
  std::string file = tier::volume_file(path);
  struct stat info{};
  if (stat(file.c_str(), &info) == 0) {
    found.bytes = static_cast<std::uint64_t>(info.st_blocks) * 512;
  }
  std::ifstream in(file, std::ios::binary);
  tier::Page page{};
  if (in.read(reinterpret_cast<char*>(page.data()), page.size())) {
    Result<tier::VolumeHeader> header = tier::parse_volume_header(page);
    if (header.ok()) {
      found.volume = static_cast<int>(header->index);
      found.num_volumes = static_cast<int>(header->count);
    }
  }
  return found;
}

}  // namespace

std::vector<FoundStore> find_stores(const std::string& directory) {
  namespace fs = std::filesystem;
  std::vector<FoundStore> found;
  std::error_code error;
  auto look = [&](const fs::path& path) {
    if (fs::is_regular_file(path / tier::kVolumeName, error)) {
      found.push_back(describe(path.string()));
    }
  };
  look(directory);
  auto options = fs::directory_options::skip_permission_denied;
  fs::recursive_directory_iterator entry(directory, options, error);
  for (; !error && entry != fs::recursive_directory_iterator();
       entry.increment(error)) {
    if (entry.depth() >= kDepth) entry.disable_recursion_pending();
    std::error_code ignored;
    if (entry->is_directory(ignored) && !entry->is_symlink(ignored)) {
      look(entry->path());
    }
  }
  std::sort(
      found.begin(), found.end(),
      [](const FoundStore& a, const FoundStore& b) { return a.path < b.path; });
  return found;
}

Status remove_store(const std::string& path) {
  // Nobody can open it while we hold its lock.
  ZINF_ASSIGN(tier::DirectoryLock lock, tier::DirectoryLock::take(path));
  std::string file = tier::volume_file(path);
  if (unlink(file.c_str()) != 0 && errno != ENOENT) {
    return Status::system("remove", file, errno);
  }
  std::string lock_path = path + "/" + tier::kLockName;
  if (unlink(lock_path.c_str()) != 0 && errno != ENOENT) {
    return Status::system("remove", lock_path, errno);
  }
  if (rmdir(path.c_str()) != 0 && errno != ENOTEMPTY && errno != EEXIST &&
      errno != EBUSY) {
    return Status::system("remove", path, errno);
  }
  return {};
}

}  // namespace zinf
