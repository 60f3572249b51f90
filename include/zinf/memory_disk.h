// A disk in memory that can lose its power: for tests of what survives.
//
// Files written through io::Backend::kMemory live in one. It remembers what was
// synced and, in order, every write since; a crash keeps, loses or tears each
// of those by itself.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace zinf::io {

class MemoryDriver;

// Thread-safe: several Ios may share one.
class MemoryDisk {
 public:
  class Impl;  // for the driver

  MemoryDisk();
  ~MemoryDisk();
  MemoryDisk(const MemoryDisk&) = delete;
  MemoryDisk& operator=(const MemoryDisk&) = delete;

  // The disk as it could be found after a power loss now: everything synced,
  // and of each later write all, nothing, or some of its sectors (of 512 bytes
  // or 4 KiB); a new size all or nothing. The seed decides; equal seeds give
  // equal disks.
  std::shared_ptr<MemoryDisk> after_crash(std::uint64_t seed) const;

  // Lets so many more writes, syncs and resizes happen; then the power is off:
  // each of them fails with EIO and changes nothing. Reads still work.
  void cut_power_after(std::uint64_t operations);

  // Writes, syncs and resizes so far.
  std::uint64_t operations() const;
  std::uint64_t unsynced_writes() const;

  // Flips one bit, durably.
  void flip_bit(const std::string& path, std::uint64_t offset);
  // Cuts a file's end off, durably.
  void truncate(const std::string& path, std::uint64_t bytes);
  bool exists(const std::string& path) const;

 private:
  friend class MemoryDriver;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zinf::io
