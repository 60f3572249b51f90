#include "src/tier/leftovers.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "src/io/scratch.h"
#include "src/tier/run_directory.h"

namespace zinf::tier {
namespace {

// A directory of ranks has one of each, which has a volume or an unfinished
// directory.
constexpr int kRankDepth = 2;

struct CloseDirectory {
  void operator()(DIR* directory) const { closedir(directory); }
};

bool is_rank(const std::string& name) {
  int rank = 0;
  int ranks = 0;
  return std::sscanf(name.c_str(), "rank-%d-of-%d", &rank, &ranks) == 2;
}

bool is_store_file(const std::string& name) {
  return name == kVolumeName || name == kLockName;
}

std::optional<std::uint64_t> bytes_in(int directory, int depth) {
  std::uint64_t bytes = 0;
  for (const std::string& name : names_in(directory)) {
    struct stat info{};
    if (fstatat(directory, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
      continue;
    }
    bytes += static_cast<std::uint64_t>(info.st_blocks) * 512;
    if (is_store_file(name) && !S_ISDIR(info.st_mode)) continue;
    bool inner = S_ISDIR(info.st_mode) && depth > 0 &&
                 (is_rank(name) || is_unfinished(name));
    if (!inner) return std::nullopt;
    Descriptor within = enter_directory(directory, name);
    auto more =
        within.get() >= 0 ? bytes_in(within.get(), depth - 1) : std::nullopt;
    if (!more) return std::nullopt;
    bytes += *more;
  }
  return bytes;
}

void remove_in(int directory, int depth) {
  for (const std::string& name : names_in(directory)) {
    if (is_store_file(name)) {
      unlinkat(directory, name.c_str(), 0);
    } else if (depth > 0 && (is_rank(name) || is_unfinished(name))) {
      Descriptor within = enter_directory(directory, name);
      if (within.get() < 0) continue;
      remove_in(within.get(), depth - 1);
      unlinkat(directory, name.c_str(), AT_REMOVEDIR);
    }
  }
}

}  // namespace

std::vector<std::string> names_in(int directory) {
  std::vector<std::string> names;
  int again = openat(directory, ".", kDirectory);
  std::unique_ptr<DIR, CloseDirectory> listing(again >= 0 ? fdopendir(again)
                                                          : nullptr);
  if (listing == nullptr) return names;
  while (const dirent* entry = readdir(listing.get())) {
    std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(std::move(name));
  }
  return names;
}

Descriptor enter_directory(int directory, const std::string& name) {
  return Descriptor(openat(directory, name.c_str(), kDirectory | O_NOFOLLOW));
}

bool is_unfinished(std::string_view name) {
  std::size_t at = name.rfind(io::kUnfinished);
  if (at == std::string_view::npos) return false;
  std::string_view end =
      name.substr(at + std::string_view(io::kUnfinished).size());
  return end.empty() || (end.size() > 1 && end[0] == '-' &&
                         end.find_first_not_of("0123456789abcdef", 1) ==
                             std::string_view::npos);
}

std::optional<std::uint64_t> leftover_bytes(int directory) {
  return bytes_in(directory, kRankDepth);
}

void remove_leftover(int directory) { remove_in(directory, kRankDepth); }

}  // namespace zinf::tier
