// A directory on a fast disk as people write it: "/mnt/nvme", or with a limit
// "/mnt/nvme:500GB".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zinf/status.h"

namespace zinf {

struct NvmePath {
  std::string path;
  // Of the disk, for all files of one engine in it; 0: no limit.
  std::uint64_t limit_bytes = 0;
};

// "{local_rank}" is replaced by the process's LOCAL_RANK, or 0. What exists is
// a path, whatever colons it has; otherwise what follows the last colon is the
// limit. kInvalid, with the text, when that is no size.
Result<NvmePath> parse_nvme_path(std::string_view text);

}  // namespace zinf
