// Addresses that stand for storages that are not in memory.
//
// A storage that was emptied points to a range of its own size that cannot be
// touched. Who asks torch for a mutable pointer never sees it; who reads
// through a const pointer without asking faults, and the handler puts a copy of
// the content there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "zinf/status.h"

namespace zinf {

// The content of a range that was touched: copies it to `to`. An error ends the
// program, as any other fault would, with its text.
class FaultSource {
 public:
  virtual ~FaultSource() = default;
  virtual Status copy_content(std::byte* to, std::size_t bytes) = 0;
};

// A range of addresses. Move-only would be too much: a unit has one for life.
class Sentinel {
 public:
  // Reserves addresses, no memory. The source must outlive it.
  Sentinel(std::size_t bytes, FaultSource& source);
  ~Sentinel();
  Sentinel(const Sentinel&) = delete;
  Sentinel& operator=(const Sentinel&) = delete;

  void* address() const { return address_; }
  // Takes a copy away that a fault has put there.
  void clear();

  static std::uint64_t num_faults();

 private:
  friend bool serve_fault(std::byte* address, bool write);
  bool put_copy();

  const std::size_t mapped_bytes_;
  const std::size_t bytes_;
  FaultSource& source_;
  std::byte* address_;
  std::mutex mutex_;  // several threads may touch it at once
  bool has_copy_ = false;
};

}  // namespace zinf
