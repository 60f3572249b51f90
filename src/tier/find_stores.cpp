#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "src/base/strf.h"
#include "src/io/scratch.h"
#include "src/tier/format.h"
#include "src/tier/leftovers.h"
#include "src/tier/run_directory.h"
#include "zinf/store.h"

namespace zinf {
namespace {

using tier::Descriptor;
using tier::kDirectory;
using tier::names_in;

constexpr int kDepth = 5;  // run directories are not hidden deeper
constexpr int kUnknown = -1;

// "zinf-4711-0": scratch of earlier versions.
bool is_old_scratch(std::string_view name) {
  return name.starts_with("zinf-") && name.size() > 5 &&
         name.find_first_not_of("0123456789-", 5) == std::string_view::npos;
}

// Of a file system without O_TMPFILE: scratch that was killed before it lost
// its name, and a save before it got its own.
bool is_nameless(std::string_view name) {
  return name.starts_with(io::kScratchName) ||
         (name.starts_with(std::string("zinf") + io::kUnfinished + "-") &&
          tier::is_unfinished(name));
}

// "x.unfinished" of earlier versions could be anyone's while it is empty.
bool is_left_by_save(int fd, std::string_view name) {
  return tier::is_unfinished(name) &&
         (!name.ends_with(io::kUnfinished) || !names_in(fd).empty());
}

// Whether it could be locked now: a save in the making holds this lock. Without
// locks that is not known.
bool is_free(int fd) {
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) return false;
  (void)flock(fd, LOCK_UN);
  return true;
}

int owner_of(int directory, const std::string& path) {
  Result<Descriptor> lock = tier::open_lock(directory, path, O_RDONLY);
  if (!lock.ok()) return kUnknown;
  if (lock->get() < 0 || flock(lock->get(), LOCK_SH | LOCK_NB) == 0) return 0;
  if (errno != EWOULDBLOCK) return 0;
  int pid = tier::pid_in(lock->get());
  return pid > 0 ? pid : kUnknown;
}

// Reads the header. A volume without one, or a first one without superblocks,
// was killed during its creation.
void describe_volume(int directory, const struct stat& info,
                     FoundStore& found) {
  found.bytes = static_cast<std::uint64_t>(info.st_blocks) * 512;
  Descriptor file(openat(directory, tier::kVolumeName,
                         O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  std::array<tier::Page, 3> pages{};
  ssize_t got =
      file.get() < 0 ? -1 : pread(file.get(), pages.data(), sizeof pages, 0);
  if (got < 0) return;
  bool zero = pages[1] == tier::Page{} && pages[2] == tier::Page{};
  Result<tier::VolumeHeader> header = tier::parse_volume_header(pages[0]);
  if (header.ok()) {
    found.volume = static_cast<int>(header->index);
    found.num_volumes = static_cast<int>(header->count);
    found.leftover = found.volume == 0 && zero;
  } else {
    found.leftover = pages[0] == tier::Page{} && zero;
  }
}

void look_into(int fd, const std::string& path, int depth,
               std::vector<FoundStore>& found) {
  struct stat own{};
  struct stat volume{};
  if (fstat(fd, &own) != 0) return;
  FoundStore here;
  here.path = path;
  here.inode = own.st_ino;
  std::string name = std::filesystem::path(path).filename().string();
  bool has_volume =
      fstatat(fd, tier::kVolumeName, &volume, AT_SYMLINK_NOFOLLOW) == 0 &&
      S_ISREG(volume.st_mode);
  if (is_left_by_save(fd, name) || (!has_volume && is_old_scratch(name))) {
    if (auto bytes = tier::leftover_bytes(fd)) {
      here.bytes = *bytes;
      here.leftover = true;
      here.owner = is_free(fd) ? owner_of(fd, path) : kUnknown;
      found.push_back(std::move(here));
      return;
    }
  }
  if (has_volume) {
    here.owner = owner_of(fd, path);
    describe_volume(fd, volume, here);
    found.push_back(std::move(here));
  }
  for (const std::string& inner : names_in(fd)) {
    struct stat info{};
    if (fstatat(fd, inner.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (S_ISDIR(info.st_mode) && depth > 0) {
      Descriptor within = tier::enter_directory(fd, inner);
      if (within.get() >= 0) {
        look_into(within.get(), path + "/" + inner, depth - 1, found);
      }
    } else if (S_ISREG(info.st_mode) && is_nameless(inner)) {
      Descriptor file(openat(fd, inner.c_str(),
                             O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
      FoundStore left;
      left.path = path + "/" + inner;
      left.bytes = static_cast<std::uint64_t>(info.st_blocks) * 512;
      left.owner = file.get() >= 0 && is_free(file.get()) ? 0 : kUnknown;
      left.leftover = true;
      left.inode = info.st_ino;
      found.push_back(std::move(left));
    }
  }
}

Status remove_file(const FoundStore& found) {
  Descriptor file(::open(found.path.c_str(),
                         O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat info{};
  if (file.get() < 0 || fstat(file.get(), &info) != 0) {
    return Status::system("open", found.path, errno);
  }
  if (info.st_ino != found.inode || !S_ISREG(info.st_mode) ||
      flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    return tier::refuse(found.path, "is in use");
  }
  if (unlink(found.path.c_str()) == 0) return {};
  return Status::system("remove", found.path, errno);
}

}  // namespace

std::vector<FoundStore> find_stores(const std::string& directory) {
  std::vector<FoundStore> found;
  Descriptor top(::open(directory.c_str(), kDirectory));
  if (top.get() >= 0) look_into(top.get(), directory, kDepth, found);
  std::sort(
      found.begin(), found.end(),
      [](const FoundStore& a, const FoundStore& b) { return a.path < b.path; });
  return found;
}

Status remove_store(const FoundStore& found) {
  const std::string& path = found.path;
  struct stat info{};
  if (lstat(path.c_str(), &info) != 0) {
    return Status::system("remove", path, errno);
  }
  if (found.leftover && S_ISREG(info.st_mode)) return remove_file(found);
  ZINF_ASSIGN(Descriptor directory, tier::open_unlinked(path));
  if (fstat(directory.get(), &info) != 0) {
    return Status::system("stat", path, errno);
  }
  if (found.inode != 0 && info.st_ino != found.inode) {
    return tier::refuse(path, "was replaced since it was found");
  }
  if (info.st_uid != geteuid() && geteuid() != 0) {
    return tier::refuse(path, strf("belongs to user %u", info.st_uid));
  }
  // No process can begin to use it while the locks are held.
  if (flock(directory.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return tier::refuse(path, "is in use");
  }
  bool lockable = faccessat(directory.get(), tier::kLockName, F_OK,
                            AT_SYMLINK_NOFOLLOW) == 0;
  Descriptor lock;
  if (lockable) {
    ZINF_ASSIGN(lock, tier::take_lock(directory.get(), path));
  }
  if (found.leftover) {
    tier::remove_leftover(directory.get());
  } else {
    for (const char* name : {tier::kVolumeName, tier::kLockName}) {
      if (unlinkat(directory.get(), name, 0) != 0 && errno != ENOENT) {
        return Status::system("remove", path + "/" + name, errno);
      }
    }
  }
  if (rmdir(path.c_str()) != 0 && errno != ENOTEMPTY && errno != EEXIST &&
      errno != EBUSY) {
    return Status::system("remove", path, errno);
  }
  return {};
}

}  // namespace zinf
