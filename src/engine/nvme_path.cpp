#include "zinf/nvme_path.h"

#include <cstdlib>
#include <filesystem>

#include "zinf/bytes.h"

namespace zinf {
namespace {

bool exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

std::string with_local_rank(std::string_view text) {
  constexpr std::string_view kPlace = "{local_rank}";
  const char* rank = std::getenv("LOCAL_RANK");
  std::string given = rank == nullptr ? "0" : rank;
  std::string path(text);
  for (std::size_t at = path.find(kPlace); at != std::string::npos;
       at = path.find(kPlace, at + given.size())) {
    path.replace(at, kPlace.size(), given);
  }
  return path;
}

}  // namespace

Result<NvmePath> parse_nvme_path(std::string_view text) {
  std::string path = with_local_rank(text);
  std::size_t colon = path.rfind(':');
  if (colon == std::string::npos || exists(path)) return NvmePath{path};
  std::string size = path.substr(colon + 1);
  std::string before = path.substr(0, colon);
  Result<std::uint64_t> limit = parse_bytes(size);
  std::string context = "nvme is \"" + path + "\": the limit after its colon";
  if (!limit.ok()) {
    // Neither a limit nor a directory with one: a path that is not there.
    if (!exists(before)) return NvmePath{path};
    return limit.status().in(context);
  }
  if (*limit != 0) return NvmePath{before, *limit};
  return Status::error(Code::kInvalid, context + " must be more than nothing");
}

}  // namespace zinf
