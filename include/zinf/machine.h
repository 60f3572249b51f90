// What this machine has, read from /proc and /sys.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zinf {

struct Machine {
  std::string cpu;               // "AMD EPYC ..."
  int cores = 0;                 // that this process may use
  std::vector<std::string> isa;  // of those that matter: avx2, fma, ...
  std::string kernel;            // "6.18.44"
  std::uint64_t memory_bytes = 0;
  std::uint64_t available_bytes = 0;  // MemAvailable
  // The tightest memory limit of this process's control groups (v1 or v2).
  std::optional<std::uint64_t> cgroup_limit_bytes;
  std::optional<std::uint64_t> memlock_bytes;  // none: unlimited
  std::string huge_pages;                      // "always", "madvise", "never"
};

// `root` is put before /proc and /sys (for tests).
Machine inspect_machine(const std::string& root = "");

// What this process can still take: what the system has available, within what
// its control groups and its resource limits (RLIMIT_AS, RLIMIT_DATA) leave.
std::uint64_t available_memory(const std::string& root = "");

}  // namespace zinf
