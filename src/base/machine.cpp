#include "zinf/machine.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>

namespace zinf {
namespace {

// The text after "KEY" and a colon in a file of such lines, or "".
std::string value_of(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::size_t colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) {
      continue;
    }
    std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::uint64_t kib_of(const std::string& path, std::string_view key) {
  return std::strtoull(value_of(path, key).c_str(), nullptr, 10) * 1024;
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<std::string> instruction_sets(const std::string& flags) {
  constexpr std::array<std::string_view, 8> kNames = {
      "sse4_2",  "avx2",        "fma",      "f16c",
      "avx512f", "avx512_bf16", "amx_bf16", "asimd"};
  std::vector<std::string> found;
  std::istringstream words(flags);
  for (std::string word; words >> word;) {
    if (std::find(kNames.begin(), kNames.end(), word) != kNames.end()) {
      found.push_back(word);
    }
  }
  return found;
}

// The path of this process in the memory hierarchy, and the file in each folder
// that holds the limit.
struct MemoryGroup {
  std::string mount;
  std::string path;
  const char* file = nullptr;
  const char* usage_file = nullptr;
  const char* cache_key = nullptr;  // in memory.stat
};

std::optional<MemoryGroup> memory_group(const std::string& root) {
  std::optional<MemoryGroup> unified;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    std::size_t first = line.find(':');
    std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      return MemoryGroup{root + "/sys/fs/cgroup/memory", path,
                         "memory.limit_in_bytes", "memory.usage_in_bytes",
                         "total_inactive_file"};
    }
    if (controllers.empty()) {
      unified = MemoryGroup{root + "/sys/fs/cgroup", path, "memory.max",
                            "memory.current", "inactive_file"};
    }
  }
  return unified;
}

struct GroupMemory {
  std::uint64_t limit_bytes = 0;
  std::uint64_t available_bytes = 0;
};

// Of a line "KEY NUMBER" of a file.
std::uint64_t number_of(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  for (std::string word; file >> word >> number;) {
    if (word == key) return number;
  }
  return 0;
}

// A limit holds for all groups below it: the tightest one counts.
std::optional<GroupMemory> cgroup_memory(const std::string& root,
                                         std::uint64_t memory_bytes) {
  std::optional<MemoryGroup> group = memory_group(root);
  if (!group) return std::nullopt;
  std::optional<GroupMemory> tightest;
  std::string path = group->path;
  while (true) {
    std::string folder = group->mount + path + "/";
    std::string text = first_line(folder + group->file);
    std::uint64_t limit = std::strtoull(text.c_str(), nullptr, 10);
    if (!text.empty() && text != "max" && limit < memory_bytes) {
      std::string usage = first_line(folder + group->usage_file);
      std::uint64_t used = std::strtoull(usage.c_str(), nullptr, 10);
      // The kernel drops cached files before it refuses memory.
      used -=
          std::min(used, number_of(folder + "memory.stat", group->cache_key));
      std::uint64_t left = limit - std::min(limit, used);
      if (!tightest) tightest = {limit, left};
      tightest->limit_bytes = std::min(tightest->limit_bytes, limit);
      tightest->available_bytes = std::min(tightest->available_bytes, left);
    }
    if (path.empty() || path == "/") break;
    path = path.substr(0, path.rfind('/'));
  }
  return tightest;
}

// Of a resource limit, beside the bytes that are in use.
std::uint64_t left_of(int resource, std::uint64_t used) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::numeric_limits<std::uint64_t>::max();
  }
  return limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, used);
}

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// "always [madvise] never" -> "madvise"
std::string chosen(const std::string& line) {
  std::size_t open = line.find('[');
  std::size_t close = line.find(']');
  if (open == std::string::npos || close == std::string::npos) return "never";
  return line.substr(open + 1, close - open - 1);
}

}  // namespace

Machine inspect_machine(const std::string& root) {
  Machine machine;
  std::string cpuinfo = root + "/proc/cpuinfo";
  machine.cpu = value_of(cpuinfo, "model name");
  std::string flags = value_of(cpuinfo, "flags");
  machine.isa =
      instruction_sets(flags.empty() ? value_of(cpuinfo, "Features") : flags);
  machine.cores = usable_cores();
  utsname system{};
  if (uname(&system) == 0) machine.kernel = system.release;
  std::string meminfo = root + "/proc/meminfo";
  machine.memory_bytes = kib_of(meminfo, "MemTotal");
  machine.available_bytes = kib_of(meminfo, "MemAvailable");
  if (auto group = cgroup_memory(root, machine.memory_bytes)) {
    machine.cgroup_limit_bytes = group->limit_bytes;
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
      limit.rlim_cur != RLIM_INFINITY) {
    machine.memlock_bytes = limit.rlim_cur;
  }
  machine.huge_pages =
      chosen(first_line(root + "/sys/kernel/mm/transparent_hugepage/enabled"));
  return machine;
}

std::uint64_t available_memory(const std::string& root) {
  std::string meminfo = root + "/proc/meminfo";
  std::uint64_t bytes = kib_of(meminfo, "MemAvailable");
  if (auto group = cgroup_memory(root, kib_of(meminfo, "MemTotal"))) {
    bytes = std::min(bytes, group->available_bytes);
  }
  std::string status = root + "/proc/self/status";
  bytes = std::min(bytes, left_of(RLIMIT_AS, kib_of(status, "VmSize")));
  return std::min(bytes, left_of(RLIMIT_DATA, kib_of(status, "VmData")));
}

}  // namespace zinf
