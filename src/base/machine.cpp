#include "zinf/machine.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <fstream>
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
                         "memory.limit_in_bytes"};
    }
    if (controllers.empty()) {
      unified = MemoryGroup{root + "/sys/fs/cgroup", path, "memory.max"};
    }
  }
  return unified;
}

// A limit holds for all groups below it: the tightest one counts.
std::optional<std::uint64_t> cgroup_limit(const std::string& root,
                                          std::uint64_t memory_bytes) {
  std::optional<MemoryGroup> group = memory_group(root);
  if (!group) return std::nullopt;
  std::optional<std::uint64_t> tightest;
  std::string path = group->path;
  while (true) {
    std::string text = first_line(group->mount + path + "/" + group->file);
    std::uint64_t limit = std::strtoull(text.c_str(), nullptr, 10);
    if (!text.empty() && text != "max" && limit < memory_bytes) {
      tightest = std::min(tightest.value_or(limit), limit);
    }
    if (path.empty() || path == "/") break;
    path = path.substr(0, path.rfind('/'));
  }
  return tightest;
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
  machine.cgroup_limit_bytes = cgroup_limit(root, machine.memory_bytes);
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
      limit.rlim_cur != RLIM_INFINITY) {
    machine.memlock_bytes = limit.rlim_cur;
  }
  machine.huge_pages =
      chosen(first_line(root + "/sys/kernel/mm/transparent_hugepage/enabled"));
  return machine;
}

}  // namespace zinf
