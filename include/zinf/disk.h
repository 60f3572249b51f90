// What a directory's disk can do, found by trying.
#pragma once

#include <cstdint>
#include <string>

#include "zinf/status.h"

namespace zinf::io {

struct Disk {
  std::string file_system;  // "ext4", ...
  bool network = false;     // NFS and the like: slow and not always coherent
  bool in_memory = false;   // tmpfs: takes from the memory it should relieve
  bool direct = false;      // O_DIRECT works
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;  // for this user
};

// `directory` must exist and be writable; a small nameless file is written
// and read there.
Result<Disk> inspect_disk(const std::string& directory);

// ok, or why io_uring cannot be used by this process.
Status probe_uring();

// What `zinf io tune` found for a directory, kept in DIRECTORY/zinf-io.json.
struct Profile {
  std::size_t block_bytes = 0;
  int depth = 0;
  double read_gbps = 0;
  double write_gbps = 0;
};
inline constexpr const char* kProfileName = "zinf-io.json";

// kNotFound when the directory has none; kCorrupt when it makes no sense.
Result<Profile> load_profile(const std::string& directory);
Status save_profile(const std::string& directory, const Profile& profile);

}  // namespace zinf::io
