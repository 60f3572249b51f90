#include "adapters/torch/sentinel.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <cstring>
#include <map>

#include "adapters/torch/error.h"
#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/mutex.h"
#include "src/base/strf.h"

namespace zinf {

Sentinel* find_sentinel(std::byte* address);
bool serve_fault(std::byte* address);

namespace {

constexpr std::size_t kPageBytes = 4096;
// One mapping for all ranges: a process may not have many mappings.
constexpr std::size_t kRegionBytes = std::size_t{1} << 44;

struct Ranges {
  Mutex mutex;
  std::byte* region ZINF_GUARDED_BY(mutex) = nullptr;
  std::size_t bytes ZINF_GUARDED_BY(mutex) = 0;  // of the region
  std::size_t next ZINF_GUARDED_BY(mutex) = 0;
  // Freed ranges by size: sizes come back, step after step.
  std::multimap<std::size_t, std::byte*> free ZINF_GUARDED_BY(mutex);
  std::map<std::byte*, Sentinel*> used ZINF_GUARDED_BY(mutex);
};

Ranges& ranges() {
  static auto* all = new Ranges;  // storages may outlive every static
  return *all;
}

std::atomic<std::uint64_t> faults = 0;
struct sigaction previous;

bool is_write([[maybe_unused]] void* context) {
#if defined(__x86_64__)
  constexpr unsigned long kWriteBit = 2;  // of the page fault's error code
  auto* user = static_cast<ucontext_t*>(context);
  auto code = static_cast<unsigned long>(user->uc_mcontext.gregs[REG_ERR]);
  return (code & kWriteBit) != 0;
#else
  return false;
#endif
}

// The fault that this thread serves on a stack of its own.
struct Fault {
  std::byte* address = nullptr;
  bool served = false;
};
thread_local Fault* current = nullptr;

// The stack for signals would be used from its begin by the next one, while the
// handler below is still on it.
void serve_current() {
  stack_t off{};
  off.ss_flags = SS_DISABLE;
  stack_t before{};
  sigaltstack(&off, &before);
  current->served = serve_fault(current->address);
  sigaltstack(&before, nullptr);
}

// Content comes from disks, after an update that may have been put off: more
// than fits on a small stack for signals, such as that of Python's
// faulthandler.
bool serve_on_own_stack(std::byte* address) {
  constexpr std::size_t kStackBytes = std::size_t{1} << 20;
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (stack == MAP_FAILED) return false;
  Fault fault{.address = address};
  current = &fault;
  ucontext_t here{};
  ucontext_t there{};
  getcontext(&there);
  there.uc_stack.ss_sp = stack;
  there.uc_stack.ss_size = kStackBytes;
  there.uc_link = &here;
  makecontext(&there, &serve_current, 0);
  swapcontext(&here, &there);
  munmap(stack, kStackBytes);
  return fault.served;
}

bool on_signal_stack() {
  stack_t now{};
  return sigaltstack(nullptr, &now) == 0 && (now.ss_flags & SS_ONSTACK) != 0;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  auto* address = static_cast<std::byte*>(info->si_addr);
  // Only const pointers lead to a sentinel: a write is a true fault.
  if (!is_write(context) && find_sentinel(address) != nullptr &&
      (on_signal_stack() ? serve_on_own_stack(address)
                         : serve_fault(address))) {
    return;
  }
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal);
  } else {
    sigaction(signal, &previous, nullptr);  // the retry ends the program
  }
}

void install_handler() {
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  // The handler reads from disks: further signals and its own faults may come.
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  ZINF_CHECK(sigaction(SIGSEGV, &action, &previous) == 0, "sigaction");
}

void map_region(Ranges& all) ZINF_REQUIRES(all.mutex) {
  install_handler();
  for (std::size_t bytes = kRegionBytes; bytes >= kRegionBytes >> 8;
       bytes /= 2) {
    void* region = mmap(nullptr, bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) continue;
    all.region = static_cast<std::byte*>(region);
    all.bytes = bytes;
    return;
  }
}

}  // namespace

Sentinel::Sentinel(std::size_t bytes, FaultServer& server)
    : mapped_bytes_(align_up(bytes + 1, kPageBytes)), server_(server) {
  Ranges& all = ranges();
  MutexLock lock(all.mutex);
  if (all.region == nullptr) map_region(all);
  auto found = all.free.find(mapped_bytes_);
  if (found != all.free.end()) {
    address_ = found->second;
    all.free.erase(found);
  } else if (all.next + mapped_bytes_ <= all.bytes) {
    address_ = all.region + all.next;
    all.next += mapped_bytes_;
  } else {
    throw Error(Status::error(
        Code::kUnsupported,
        strf("no addresses are left for a tensor of %zu bytes: zinf reserves "
             "them without memory, raise the limit of ulimit -v",
             bytes)));
  }
  all.used[address_] = this;
}

Sentinel::~Sentinel() {
  clear();
  Ranges& all = ranges();
  MutexLock lock(all.mutex);
  all.used.erase(address_);
  all.free.emplace(mapped_bytes_, address_);
}

void Sentinel::clear() {
  if (!has_copy_) return;
  void* mapped =
      mmap(address_, mapped_bytes_, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  ZINF_CHECK(mapped == address_, "mmap of %zu bytes", mapped_bytes_);
  has_copy_ = false;
}

std::uint64_t Sentinel::num_faults() { return faults; }

// The copy is made elsewhere and moved when it is whole: another thread may be
// reading the range, and must fault until then.
bool Sentinel::put_copy(std::span<const std::byte> content) {
  void* copy = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return false;
  std::memcpy(copy, content.data(), content.size());
  if (mprotect(copy, mapped_bytes_, PROT_READ) != 0 ||
      mremap(copy, mapped_bytes_, mapped_bytes_, MREMAP_MAYMOVE | MREMAP_FIXED,
             address_) == MAP_FAILED) {
    munmap(copy, mapped_bytes_);
    return false;
  }
  ++faults;
  has_copy_ = true;
  return true;
}

Sentinel* find_sentinel(std::byte* address) {
  Ranges& all = ranges();
  MutexLock lock(all.mutex);
  auto after = all.used.upper_bound(address);
  if (after == all.used.begin()) return nullptr;
  Sentinel* sentinel = std::prev(after)->second;
  bool inside = address < sentinel->address_ + sentinel->mapped_bytes_;
  return inside ? sentinel : nullptr;
}

bool serve_fault(std::byte* address) {
  Sentinel* sentinel = find_sentinel(address);
  return sentinel != nullptr && sentinel->server_.serve_fault();
}

}  // namespace zinf
