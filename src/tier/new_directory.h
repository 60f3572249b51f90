// A directory of a save that appears under its name at once, whole and on the
// disk.
#pragma once

#include <string>
#include <vector>

#include "src/io/scratch.h"
#include "src/tier/descriptor.h"
#include "zinf/status.h"

namespace zinf::tier {

// The directories above a path that were missing. Move-only.
class NewParents {
 public:
  // Makes them, durably. kInvalid when something has the path already.
  static Result<NewParents> make(const std::string& path);
  ~NewParents() { remove(); }
  NewParents(NewParents&&) noexcept = default;
  NewParents& operator=(NewParents&&) noexcept = default;

  // The one that the path is in.
  const std::string& innermost() const { return innermost_; }
  void keep() { made_.clear(); }
  void remove();  // those that are empty, unless keep() was called

 private:
  NewParents() = default;
  std::string innermost_;
  std::vector<std::string> made_;  // outermost first
};

// Until it is published it has a name that cannot be guessed, beside its final
// one, and is locked, so that `zinf checkpoint prune` leaves it alone.
// Move-only.
class NewDirectory {
 public:
  // Makes it (0700) in the directory that `path` is in, which must exist.
  // kInvalid when something has the path. What killed processes left of the
  // same path goes.
  static Result<NewDirectory> make(const std::string& path);
  ~NewDirectory() { remove(); }
  NewDirectory(NewDirectory&& other) noexcept;
  NewDirectory& operator=(NewDirectory&&) = delete;

  int fd() const { return fd_.get(); }
  std::string path() const { return parent_path_ + "/" + name_; }  // its own

  // Gives it its final name, durably, together with the names in it; kInvalid
  // when something has that. On failure it is as before.
  Status publish();
  // What saves put into it, then itself, unless it was published.
  void remove();

 private:
  NewDirectory() = default;

  std::string parent_path_;
  std::string name_;  // now; empty: published or removed
  std::string final_name_;
  Descriptor parent_;
  Descriptor fd_;
};

// Gives the file its name in a new run directory: see Store::link().
Status link_volume(io::Scratch& file, const std::string& path);

}  // namespace zinf::tier
