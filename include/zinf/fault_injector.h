// Faults under everything that the process does with disks, chosen while it
// runs: for tests of what stands above an Io and makes its Ios itself.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "zinf/io.h"

namespace zinf::io {

// Thread-safe. Operations are counted over all Ios that go through it.
class FaultInjector {
 public:
  // Every Io that is made from now on, until remove(), goes through this one.
  static std::shared_ptr<FaultInjector> install();
  static void remove();
  // Null in all programs but tests.
  static std::shared_ptr<FaultInjector> installed();

  // From here on operations are counted from 1, and the one that the fault
  // names meets it. kRate and chance (nth = 0) are not for this.
  void set(const Fault& fault);
  // No fault from here on; operations are counted from 1 too.
  void clear();

  std::uint64_t count(Operation operation) const;
  bool fired() const;  // the fault of the last set() was met before clear()

  // For drivers: counts the operation and says which fault it meets.
  std::optional<Fault> next(Operation operation);

 private:
  FaultInjector() = default;

  mutable std::mutex mutex_;
  std::optional<Fault> fault_;
  std::array<std::uint64_t, kNumOperations> counts_{};
  bool fired_ = false;
};

}  // namespace zinf::io
