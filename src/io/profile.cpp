#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "src/base/strf.h"
#include "src/io/scratch.h"
#include "zinf/disk.h"
#include "zinf/io.h"

namespace zinf::io {

Result<Profile> load_profile(const std::string& directory) {
  std::string path = directory + "/" + kProfileName;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return Status::system("open", path, ENOENT);
  }
  std::ifstream file(path);
  auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  auto bad = [&](const char* what) {
    return Status::error(Code::kCorrupt,
                         strf("%s: %s; run 'zinf io tune %s' again",
                              path.c_str(), what, directory.c_str()));
  };
  if (!json.is_object()) return bad("not a JSON object");
  for (const char* key : {"block", "depth", "read_gbps", "write_gbps"}) {
    if (!json.contains(key) || !json[key].is_number()) {
      return bad("block, depth, read_gbps and write_gbps must be numbers");
    }
  }
  Profile profile;
  double block = json["block"].get<double>();
  double depth = json["depth"].get<double>();
  if (!(block >= 0 && block <= 1e10 && depth >= 0 && depth <= 1e6)) {
    return bad("block or depth is out of range");
  }
  profile.block_bytes = static_cast<std::size_t>(block);
  profile.depth = static_cast<int>(depth);
  profile.read_gbps = json["read_gbps"].get<double>();
  profile.write_gbps = json["write_gbps"].get<double>();
  Options options{.block_bytes = profile.block_bytes, .depth = profile.depth};
  Status valid = options.validate();
  if (!valid.ok()) return bad(valid.text().c_str());
  return profile;
}

Status save_profile(const std::string& directory, const Profile& profile) {
  std::string path = directory + "/" + kProfileName;
  std::string draft = path + unfinished_suffix();
  nlohmann::ordered_json json = {{"block", profile.block_bytes},
                                 {"depth", profile.depth},
                                 {"read_gbps", profile.read_gbps},
                                 {"write_gbps", profile.write_gbps}};
  std::string text = json.dump(2) + "\n";
  int fd = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return Status::system("write", path, errno);
  errno = 0;
  bool written =
      write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(fd);
  // The old profile stands until the new one is whole.
  if (written && std::rename(draft.c_str(), path.c_str()) == 0) return {};
  int error = errno != 0 ? errno : EIO;
  unlink(draft.c_str());
  return Status::system("write", path, error);
}

}  // namespace zinf::io
