#include "src/base/mapping.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "src/base/align.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/machine.h"

namespace zinf {

Result<Mapping> Mapping::create(std::size_t bytes) {
  // The system would give more than there is and kill somebody later.
  Machine machine = inspect_machine();
  std::uint64_t available =
      std::min(machine.available_bytes,
               machine.cgroup_limit_bytes.value_or(machine.available_bytes));
  auto refuse = [&](const char* why) {
    return Status::error(Code::kOverBudget,
                         strf("%s of memory are wanted, %s are available%s",
                              format_bytes(bytes).c_str(),
                              format_bytes(available).c_str(), why));
  };
  if (bytes > available) return refuse("");
  bytes = align_up(bytes, kHugePage);
  void* mapping = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return refuse(", but the system refuses");
  Mapping made(mapping, bytes);
  madvise(made.span().data(), bytes, MADV_HUGEPAGE);
  std::memset(made.span().data(), 0, bytes);
  return made;
}

Mapping::~Mapping() {
  if (mapping_ != nullptr) munmap(mapping_, bytes_ + kHugePage);
}

std::span<std::byte> Mapping::span() const {
  auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  std::size_t skip = align_up(address, kHugePage) - address;
  return {static_cast<std::byte*>(mapping_) + skip, bytes_};
}

}  // namespace zinf
