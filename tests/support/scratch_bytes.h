// Of the disk: what open files without names take.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>

namespace zinf {

// Of this process's files in a directory, as the file system counts it.
inline std::uint64_t scratch_bytes(const std::string& directory) {
  std::map<ino_t, std::uint64_t> blocks;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    std::string file = std::filesystem::read_symlink(entry, error).string();
    struct stat info{};
    if (!file.starts_with(directory + "/")) continue;
    if (stat(entry.path().c_str(), &info) != 0) continue;
    blocks[info.st_ino] = static_cast<std::uint64_t>(info.st_blocks);
  }
  std::uint64_t sum = 0;
  for (const auto& [inode, count] : blocks) sum += count;
  return sum * 512;
}

}  // namespace zinf
