// The private directory of a store on one path: made, locked, checked. It is
// held by a descriptor, so that everything happens in the directory that was
// checked, whatever has its name meanwhile.
#pragma once

#include <fcntl.h>

#include <string>

#include "src/tier/descriptor.h"
#include "zinf/status.h"
#include "zinf/store.h"

namespace zinf::tier {

inline constexpr const char* kVolumeName = "volume.zinf";
inline constexpr const char* kLockName = "lock";

inline std::string volume_file(const std::string& directory) {
  return directory + "/" + kVolumeName;
}

// Move-only.
class RunDirectory {
 public:
  RunDirectory() = default;

  // Makes it (0700) and locks it. One that is there is taken over when it is
  // this user's alone and no process has it locked; else kPermission.
  static Result<RunDirectory> make(const std::string& path);
  // Locks it as the access needs. A directory that is only read may be anyone's
  // and may be named by a symbolic link; one for writing must be this user's.
  static Result<RunDirectory> open(const std::string& path, Access access);

  int fd() const { return fd_.get(); }
  bool made() const { return made_; }  // by make()
  // Makes names in it, and its own, durable.
  Status sync() const;
  void remove_lock() const;

 private:
  Status open_for_writing();
  Status lock();

  std::string path_;
  Descriptor fd_;
  Descriptor lock_;  // the lock goes with the process, however that ends
  bool made_ = false;
};

// Flags of open() for directories.
inline constexpr int kDirectory = O_RDONLY | O_DIRECTORY | O_CLOEXEC;

// kPermission: the path and why.
Status refuse(const std::string& path, const std::string& why);

// Opens a directory by its own name: kPermission for a symbolic link.
Result<Descriptor> open_unlinked(const std::string& path);

// The lock file of a directory, opened with these flags: a regular file with
// one name, else kPermission. Empty when there is none.
Result<Descriptor> open_lock(int directory, const std::string& path, int flags);

// Opens or makes the lock file and locks it; kPermission, with the owner's pid,
// when another process has it locked.
Result<Descriptor> take_lock(int directory, const std::string& path);

int pid_in(int lock);  // 0: none

// fsync() of a directory or a file.
Status sync_descriptor(int fd, const std::string& path);

}  // namespace zinf::tier
