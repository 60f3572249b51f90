#include "src/tier/new_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "src/tier/leftovers.h"
#include "src/tier/run_directory.h"

namespace zinf::tier {
namespace {

// The path without slashes at its end, and its two parts.
struct Split {
  explicit Split(const std::string& path) {
    std::filesystem::path whole =
        std::filesystem::absolute(path).lexically_normal();
    if (!whole.has_filename()) whole = whole.parent_path();
    parent = whole.parent_path().string();
    name = whole.filename().string();
  }
  std::string parent;
  std::string name;
};

Status exists_already(const std::string& path) {
  return Status::error(Code::kInvalid,
                       path +
                           " exists already: remove it, or choose another "
                           "name");
}

Status sync_directory(const std::string& path) {
  Descriptor fd(::open(path.c_str(), kDirectory));
  if (fd.get() < 0) return Status::system("open", path, errno);
  return sync_descriptor(fd.get(), path);
}

Status check_new(int directory, const std::string& name,
                 const std::string& path) {
  struct stat info{};
  if (fstatat(directory, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0) {
    return exists_already(path);
  }
  if (errno == ENOENT || errno == ENOTDIR) return {};
  return Status::system("stat", path, errno);
}

// Where the file system cannot do it at once, something may come between.
Status rename_to_new(int directory, const std::string& from,
                     const std::string& to, const std::string& path) {
  if (renameat2(directory, from.c_str(), directory, to.c_str(),
                RENAME_NOREPLACE) == 0) {
    return {};
  }
  if (errno == EINVAL || errno == ENOSYS) {
    ZINF_TRY(check_new(directory, to, path));
    if (renameat(directory, from.c_str(), directory, to.c_str()) == 0) {
      return {};
    }
  }
  if (errno == EEXIST || errno == ENOTEMPTY) return exists_already(path);
  return Status::system("rename " + from + " to", path, errno);
}

// Of the same final name, when no process has them locked.
void remove_stale(int parent, const std::string& final_name) {
  for (const std::string& name : names_in(parent)) {
    if (!is_unfinished(name) ||
        !name.starts_with(final_name + io::kUnfinished)) {
      continue;
    }
    Descriptor stale = enter_directory(parent, name);
    struct stat info{};
    bool ours = stale.get() >= 0 && fstat(stale.get(), &info) == 0 &&
                info.st_uid == geteuid() && leftover_bytes(stale.get());
    if (!ours || flock(stale.get(), LOCK_EX | LOCK_NB) != 0) continue;
    remove_leftover(stale.get());
    unlinkat(parent, name.c_str(), AT_REMOVEDIR);
  }
}

}  // namespace

Result<NewParents> NewParents::make(const std::string& path) {
  NewParents parents;
  Split to(path);
  ZINF_TRY(check_new(AT_FDCWD, to.parent + "/" + to.name, path));
  parents.innermost_ = to.parent;
  std::vector<std::string> missing;
  for (std::string parent = to.parent;; parent = Split(parent).parent) {
    struct stat info{};
    if (stat(parent.c_str(), &info) == 0) break;
    if (errno != ENOENT) return Status::system("stat", parent, errno);
    missing.push_back(parent);
  }
  for (auto parent = missing.rbegin(); parent != missing.rend(); ++parent) {
    if (mkdir(parent->c_str(), 0777) == 0) {
      parents.made_.push_back(*parent);
      ZINF_TRY(sync_directory(Split(*parent).parent));
    } else if (errno != EEXIST) {
      return Status::system("create", *parent, errno);
    }
  }
  return parents;
}

void NewParents::remove() {
  for (; !made_.empty(); made_.pop_back()) rmdir(made_.back().c_str());
}

NewDirectory::NewDirectory(NewDirectory&& other) noexcept
    : parent_path_(std::move(other.parent_path_)),
      name_(std::exchange(other.name_, "")),
      final_name_(std::move(other.final_name_)),
      parent_(std::move(other.parent_)),
      fd_(std::move(other.fd_)) {}

Result<NewDirectory> NewDirectory::make(const std::string& path) {
  Split to(path);
  NewDirectory made;
  made.parent_path_ = to.parent;
  made.final_name_ = to.name;
  made.parent_ = Descriptor(::open(to.parent.c_str(), kDirectory));
  int parent = made.parent_.get();
  if (parent < 0) return Status::system("open", to.parent, errno);
  ZINF_TRY(check_new(parent, to.name, path));
  remove_stale(parent, to.name);
  std::string name = to.name + io::unfinished_suffix();
  if (mkdirat(parent, name.c_str(), 0700) != 0) {
    return Status::system("create", to.parent + "/" + name, errno);
  }
  made.name_ = name;
  made.fd_ = enter_directory(parent, name);
  if (made.fd() < 0) return Status::system("open", made.path(), errno);
  (void)flock(made.fd(), LOCK_EX | LOCK_NB);  // some file systems have none
  return made;
}

Status NewDirectory::publish() {
  int parent = parent_.get();
  ZINF_TRY(sync_descriptor(fd(), path()));
  ZINF_TRY(rename_to_new(parent, name_, final_name_,
                         parent_path_ + "/" + final_name_));
  Status status = sync_descriptor(parent, parent_path_);
  if (status.ok()) {
    name_.clear();
  } else if (renameat(parent, final_name_.c_str(), parent, name_.c_str()) !=
             0) {
    name_ = final_name_;
  }
  return status;
}

void NewDirectory::remove() {
  if (name_.empty()) return;
  if (fd() >= 0) remove_leftover(fd());
  unlinkat(parent_.get(), name_.c_str(), AT_REMOVEDIR);
  name_.clear();
}

Status link_volume(io::Scratch& file, const std::string& path) {
  ZINF_ASSIGN(NewDirectory directory, NewDirectory::make(path));
  std::string volume = volume_file(path);
  ZINF_TRY(file.link(directory.fd(), kVolumeName, volume));
  ZINF_TRY(sync_descriptor(file.fd(), volume));
  return directory.publish();
}

}  // namespace zinf::tier
