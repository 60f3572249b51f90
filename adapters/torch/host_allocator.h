// The process's host memory, and torch's CPU allocator on top of it.
#pragma once

#include <cstdint>
#include <memory>

#include "zinf/host_memory.h"

namespace zinf {

// Made at the first call; from then on torch's CPU tensors come from its arena,
// and an operator that would cross the limit throws a BudgetError. It is never
// destroyed: tensors outlive engines.
const std::shared_ptr<HostMemory>& process_memory();

// What one engine asks of the process's memory, for as long as it is open. All
// engines share one limit: the newest that was named counts. With the last of
// them it goes.
class HostLimit {
 public:
  // 0: 80 % of what the machine has left for this process, unless another
  // engine has named a limit.
  explicit HostLimit(std::uint64_t bytes);
  ~HostLimit();
  HostLimit(const HostLimit&) = delete;
  HostLimit& operator=(const HostLimit&) = delete;

 private:
  const std::uint64_t bytes_;
};

}  // namespace zinf
