// A directory of its own for each test, on the disk that holds the build tree
// (or $ZINF_TEST_DIR), removed with what is in it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace zinf {

class TempDir {
 public:
  TempDir() {
    const char* wanted = std::getenv("ZINF_TEST_DIR");
    std::filesystem::path parent =
        wanted != nullptr ? wanted : std::filesystem::current_path();
    std::string pattern = (parent / "zinf-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace zinf
