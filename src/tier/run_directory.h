// The private directory of a store on one path: made, locked, removed.
#pragma once

#include <string>

#include "zinf/status.h"

namespace zinf::tier {

inline constexpr const char* kVolumeName = "volume.zinf";
inline constexpr const char* kLockName = "lock";

inline std::string volume_file(const std::string& directory) {
  return directory + "/" + kVolumeName;
}

// Holds a run directory's lock. Move-only. The lock goes with the process,
// however it ends.
class DirectoryLock {
 public:
  DirectoryLock() = default;
  ~DirectoryLock();
  DirectoryLock(DirectoryLock&& other) noexcept;
  DirectoryLock& operator=(DirectoryLock&& other) noexcept;

  // kPermission, with the owner's pid, when somebody has it.
  static Result<DirectoryLock> take(const std::string& directory);

 private:
  explicit DirectoryLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

// The pid that has the directory locked; 0 when nobody has.
int lock_owner(const std::string& directory);

// Makes the directory (0700) when it is not there; true when it was made.
Result<bool> make_directory(const std::string& directory);

// Makes names in the directory durable.
Status sync_directory(const std::string& directory);

}  // namespace zinf::tier
