// Addresses that stand for storages that are not in memory.
//
// A storage that was emptied points to a range of its own size that cannot be
// touched. Who asks torch for a mutable pointer never sees it; who reads
// through a const pointer without asking faults, and the handler has a copy of
// the content put there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zinf {

// Whoever has a Sentinel: its lock guards the copy.
class FaultServer {
 public:
  virtual ~FaultServer() = default;
  // The range was read: puts a copy there, if there is none yet, from the
  // thread that faulted. False ends the program as any other fault would.
  virtual bool serve_fault() = 0;
};

// A range of addresses.
class Sentinel {
 public:
  // Reserves addresses, no memory; throws when there are none left. The server
  // must outlive it.
  Sentinel(std::size_t bytes, FaultServer& server);
  ~Sentinel();
  Sentinel(const Sentinel&) = delete;
  Sentinel& operator=(const Sentinel&) = delete;

  void* address() const { return address_; }

  bool has_copy() const { return has_copy_; }
  // False without memory for it.
  bool put_copy(std::span<const std::byte> content);
  void clear();

  static std::uint64_t num_faults();

 private:
  friend Sentinel* find_sentinel(std::byte* address);
  friend bool serve_fault(std::byte* address);

  const std::size_t mapped_bytes_;
  FaultServer& server_;
  std::byte* address_;
  bool has_copy_ = false;
};

}  // namespace zinf
