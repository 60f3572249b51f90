// What the memory driver sees of a MemoryDisk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/mutex.h"
#include "zinf/io.h"
#include "zinf/memory_disk.h"

namespace zinf::io {

// Thread-safe.
class MemoryDisk::Impl {
 public:
  struct Change {
    std::uint64_t offset = 0;
    std::vector<std::byte> data = {};
    std::optional<std::uint64_t> size = {};  // a new size, no data
  };
  struct File {
    std::vector<std::byte> now;      // what reads see
    std::vector<std::byte> durable;  // as of the last sync
    std::vector<Change> unsynced;    // since then, in order
  };

  Result<std::shared_ptr<File>> open(const std::string& path,
                                     const OpenOptions& options);
  Status remove(const std::string& path);
  Status resize(File& file, const std::string& path, std::uint64_t bytes);
  bool exists(const std::string& path) const;

  // As a driver's result: bytes moved, or -errno.
  std::int64_t read(const File& file, std::uint64_t offset,
                    std::span<std::byte> into) const;
  std::int64_t write(File& file, std::uint64_t offset,
                     std::span<const std::byte> from);
  std::int64_t sync(File& file);

  void copy_after_crash(Impl& to, std::uint64_t seed) const;
  void cut_power_after(std::uint64_t operations);
  std::uint64_t operations() const;
  std::uint64_t unsynced_writes() const;
  void flip_bit(const std::string& path, std::uint64_t offset);
  void truncate(const std::string& path, std::uint64_t bytes);
  std::uint64_t bytes(const File& file) const;

 private:
  bool has_power() ZINF_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<File>> files_ ZINF_GUARDED_BY(mutex_);
  std::uint64_t operations_ ZINF_GUARDED_BY(mutex_) = 0;
  std::uint64_t last_ ZINF_GUARDED_BY(mutex_) = ~std::uint64_t{0};
};

}  // namespace zinf::io
