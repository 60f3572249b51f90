// Addresses of its own for every storage under management.
//
// A storage that is not in use points to a range of its own size that cannot be
// touched. A touch of it faults, and the handler has the content put there: a
// copy for a read, the content itself for a write. A request for a raw pointer
// puts the content there at once (unit.h, Note [Raw pointers]).
//
// All ranges lie in one mapping, and those of small storages side by side: what
// is accessible next to each other is one mapping for the system, which allows
// a process no more than 65,530 of them (vm.max_map_count).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "zinf/block.h"
#include "zinf/budget.h"

namespace zinf {

// Installs the handler of faults before the present handler of SIGSEGV, unless
// it is the first one already. The first Sentinel does so; callers do it again
// where other code may have installed a handler since.
void install_fault_handler();
// Restores the handler that was there before. For the time in which other code
// installs one and keeps the present one as its next in line.
void remove_fault_handler();

enum class Touch : std::uint8_t { kRead, kWrite };

// Whoever has a Sentinel: its lock guards the copy.
class FaultServer {
 public:
  virtual ~FaultServer() = default;
  // The range was touched: puts there what the touch needs, if it is not there
  // yet, from the thread that faulted. False ends the program as any other
  // fault would.
  virtual bool serve_fault(Touch touch) = 0;
};

struct AddressRange;

class Sentinel {
 public:
  // Reserves addresses, no memory; throws when there are none left. The server
  // must outlive it.
  Sentinel(std::size_t bytes, FaultServer& server);
  ~Sentinel();
  Sentinel(const Sentinel&) = delete;
  Sentinel& operator=(const Sentinel&) = delete;

  void* address() const;

  bool has_copy() const;
  // A copy of this content, for reading; with Touch::kWrite also for writes,
  // which are lost. It may go at any moment: see drop_copies(). False without
  // memory for it.
  bool put_copy(std::span<const std::byte> content, Touch touch,
                Reservation paid);
  void clear();  // the copy
  // Drops copies of all ranges, the oldest first, until they have given so many
  // bytes back. Returns how many.
  static std::uint64_t drop_copies(std::uint64_t bytes);

  // Memory in the range itself, with this content, for everybody to touch. It
  // keeps the addresses while its owner is held. Empty without memory for it.
  Block put_content(std::span<const std::byte> content, Reservation paid);
  bool has_content() const;  // while there is such memory
  // Moves that memory elsewhere: a touch of the range faults again. False, and
  // nothing has changed, when the system refuses.
  bool take_away(Block& block);

  // What a copy or the content takes.
  std::size_t memory_bytes() const;

  static std::uint64_t num_faults();

 private:
  friend bool serve_fault(std::byte* address, Touch touch);

  FaultServer& server_;
  const std::shared_ptr<AddressRange> range_;
};

}  // namespace zinf
