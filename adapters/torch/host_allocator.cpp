#include "adapters/torch/host_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <vector>

#include "adapters/torch/error.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/log.h"
#include "zinf/machine.h"

namespace zinf {
namespace {

[[noreturn]] void throw_refusal(const Status& status) {
  throw_if_error(status.in("a tensor does not fit")
                     .because(process_memory()->hindrance()));
  std::abort();  // it was an error
}

class ArenaAllocator final : public c10::Allocator {
 public:
  explicit ArenaAllocator(Arena& arena) : arena_(arena) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &Arena::free, at::kCPU};
    void* block = arena_.allocate(bytes);
    if (block == nullptr) [[unlikely]] {
      Result<void*> again = arena_.try_allocate(bytes);
      if (!again.ok()) throw_refusal(again.status());
      block = *again;
    }
    return {block, block, &Arena::free, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Arena::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  Arena& arena_;
};

std::shared_ptr<HostMemory> install() {
  Result<std::shared_ptr<HostMemory>> memory = HostMemory::create(0);
  throw_if_error(memory.status());
  // Above torch's own, whatever its priority.
  c10::SetCPUAllocator(new ArenaAllocator((*memory)->arena()), 255);
  return *memory;
}

// What a user who names no limit would want: some of the memory is left for
// what is outside of torch's tensors.
std::uint64_t default_limit() {
  Machine machine = inspect_machine();
  std::uint64_t bytes = machine.available_bytes;
  if (machine.cgroup_limit_bytes) {
    bytes = std::min(bytes, *machine.cgroup_limit_bytes);
  }
  const char* ranks = std::getenv("LOCAL_WORLD_SIZE");
  std::uint64_t share =
      ranks == nullptr ? 1 : std::strtoull(ranks, nullptr, 10);
  return bytes / 5 * 4 / std::max<std::uint64_t>(share, 1);
}

struct Limits {
  std::mutex mutex;
  int engines = 0;
  std::vector<std::uint64_t> named;  // the newest last

  void apply() const {
    process_memory()->set_limit(!named.empty() ? named.back()
                                : engines > 0  ? default_limit()
                                               : 0);
  }
};

Limits& limits() {
  static auto* all = new Limits();
  return *all;
}

}  // namespace

const std::shared_ptr<HostMemory>& process_memory() {
  static const auto* memory = new std::shared_ptr<HostMemory>(install());
  return *memory;
}

HostLimit::HostLimit(std::uint64_t bytes) : bytes_(bytes) {
  Limits& all = limits();
  std::lock_guard lock(all.mutex);
  if (!all.named.empty() && bytes != 0 && all.named.back() != bytes) {
    log(LogLevel::kInfo,
        "host_memory is %s from now on, for older engines too: it was %s",
        format_bytes(bytes).c_str(), format_bytes(all.named.back()).c_str());
  }
  if (bytes != 0) all.named.push_back(bytes);
  ++all.engines;
  all.apply();
}

HostLimit::~HostLimit() {
  Limits& all = limits();
  std::lock_guard lock(all.mutex);
  auto mine = std::find(all.named.rbegin(), all.named.rend(), bytes_);
  if (mine != all.named.rend()) all.named.erase(std::next(mine).base());
  --all.engines;
  all.apply();
}

}  // namespace zinf
