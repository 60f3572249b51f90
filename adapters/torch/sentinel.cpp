#include "adapters/torch/sentinel.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <utility>

#include "adapters/torch/error.h"
#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/mutex.h"
#include "src/base/strf.h"

namespace zinf {

struct AddressRange {
  ~AddressRange();

  std::byte* const address;
  const std::size_t bytes;  // whole pages
  const std::size_t content_bytes;
  std::atomic<bool> has_copy = false;
  Reservation copy_paid = {};
  std::atomic<bool> has_content = false;
};

bool serve_fault(std::byte* address, Touch touch);

namespace {

constexpr std::size_t kRegionBytes = std::size_t{1} << 44;
constexpr std::size_t kSmallBytes = 256 * kKiB;
constexpr std::size_t kSmallChunkBytes = 64 * kMiB;

// Addresses in a row that are handed out one after the other.
struct Row {
  std::byte* next = nullptr;
  std::byte* end = nullptr;

  std::byte* take(std::size_t bytes, std::size_t alignment) {
    auto begin = align_up(reinterpret_cast<std::uintptr_t>(next), alignment);
    auto last = reinterpret_cast<std::uintptr_t>(end);
    if (begin > last || last - begin < bytes) return nullptr;
    auto* taken = reinterpret_cast<std::byte*>(begin);
    next = taken + bytes;
    return taken;
  }
};

struct Ranges {
  Mutex mutex;
  Row region ZINF_GUARDED_BY(mutex);
  Row small ZINF_GUARDED_BY(mutex);
  // Freed ranges by size: sizes come back, step after step.
  std::multimap<std::size_t, std::byte*> free ZINF_GUARDED_BY(mutex);
  std::map<std::byte*, std::pair<Sentinel*, std::size_t>> used
      ZINF_GUARDED_BY(mutex);
};

Ranges& ranges() {
  static auto* all = new Ranges;  // storages may outlive every static
  return *all;
}

// Ranges with a copy, the oldest first. A copy is made and dropped under the
// mutex: its own unit and whoever needs memory may drop it.
struct Copies {
  Mutex mutex;
  std::list<AddressRange*> ranges ZINF_GUARDED_BY(mutex);
};

Copies& copies() {
  static auto* all = new Copies;  // faults can come until the very end
  return *all;
}

// This process's memory as a file, which writes where nobody else can.
int memory_file() {
  static const int file = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
  return file;
}

bool is_sentinel(std::byte* address);

std::atomic<std::uint64_t> faults = 0;
Mutex handler_mutex;  // held to install or remove the handler
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
  Touch touch = Touch::kRead;
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
  current->served = serve_fault(current->address, current->touch);
  sigaltstack(&before, nullptr);
}

// Content comes from disks, after an update that may have been put off: more
// than fits on a small stack for signals, such as that of Python's
// faulthandler.
bool serve_on_own_stack(std::byte* address, Touch touch) {
  constexpr std::size_t kStackBytes = std::size_t{1} << 20;
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (stack == MAP_FAILED) return false;
  Fault fault{.address = address, .touch = touch};
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

// By kill() or raise(): without an address.
bool was_sent(const siginfo_t& info) { return info.si_code <= 0; }

// Ends the program as if there were no handler.
void end_by(int signal) {
  ::signal(signal, SIG_DFL);
  raise(signal);  // not blocked here: see SA_NODEFER
}

// A fault that is not ours goes to the handler that was there before.
void pass_on(int signal, siginfo_t* info, void* context) {
  // A handler that was installed after this one, and is `previous` since this
  // one was installed again, calls this one when it has done its work.
  thread_local bool passed = false;
  bool ignored = previous.sa_handler == SIG_IGN;
  if (ignored && was_sent(*info)) return;
  if (passed || ignored || previous.sa_handler == SIG_DFL) {
    return end_by(signal);
  }
  passed = true;
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal, info, context);
  } else {
    previous.sa_handler(signal);
  }
  passed = false;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  auto* address = static_cast<std::byte*>(info->si_addr);
  Touch touch = is_write(context) ? Touch::kWrite : Touch::kRead;
  if (!was_sent(*info) && is_sentinel(address) &&
      (on_signal_stack() ? serve_on_own_stack(address, touch)
                         : serve_fault(address, touch))) {
    return;
  }
  pass_on(signal, info, context);
}

bool is_first() {
  struct sigaction now{};
  ZINF_CHECK(sigaction(SIGSEGV, nullptr, &now) == 0, "sigaction");
  return (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault;
}

// Writable and touched first: all parts of a mapping that was touched as one
// can become one again.
bool map_region(std::size_t bytes, Row& region) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (mapped != MAP_FAILED) {
    (void)madvise(mapped, bytes, MADV_NOHUGEPAGE);
    *static_cast<volatile char*>(mapped) = 0;
    ZINF_CHECK(mprotect(mapped, bytes, PROT_NONE) == 0, "mprotect");
  } else {
    mapped = mmap(nullptr, bytes, PROT_NONE, kFlags, -1, 0);
    if (mapped == MAP_FAILED) return false;
  }
  auto* begin = static_cast<std::byte*>(mapped);
  region = {begin + kPage, begin + bytes};
  return true;
}

// Null: there are none left.
std::byte* take_addresses(std::size_t bytes) {
  Ranges& all = ranges();
  MutexLock lock(all.mutex);
  if (all.region.end == nullptr) {
    install_fault_handler();
    (void)memory_file();
    for (std::size_t size = kRegionBytes; size >= kRegionBytes >> 8; size /= 2)
      if (map_region(size, all.region)) break;
  }
  auto found = all.free.find(bytes);
  if (found != all.free.end()) {
    std::byte* address = found->second;
    all.free.erase(found);
    return address;
  }
  if (bytes > kSmallBytes) {
    return all.region.take(bytes, bytes < kHugePage ? kPage : kHugePage);
  }
  if (std::byte* address = all.small.take(bytes, kPage)) return address;
  std::byte* chunk = all.region.take(kSmallChunkBytes, kPage);
  if (chunk == nullptr) return nullptr;
  all.small = {chunk, chunk + kSmallChunkBytes};
  return all.small.take(bytes, kPage);
}

// From here on a touch faults.
void close_range(AddressRange& range) {
  if (range.bytes <= kSmallBytes) {
    ZINF_CHECK(mprotect(range.address, range.bytes, PROT_NONE) == 0 &&
                   madvise(range.address, range.bytes, MADV_DONTNEED) == 0,
               "mprotect of %zu bytes", range.bytes);
    return;
  }
  void* mapped =
      mmap(range.address, range.bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  ZINF_CHECK(mapped == range.address, "mmap of %zu bytes", range.bytes);
}

bool write_behind(std::byte* address, std::span<const std::byte> content) {
  while (!content.empty()) {
    auto offset = static_cast<off_t>(reinterpret_cast<std::uintptr_t>(address));
    ssize_t wrote =
        pwrite(memory_file(), content.data(), content.size(), offset);
    if (wrote <= 0) return false;
    address += wrote;
    content = content.subspan(static_cast<std::size_t>(wrote));
  }
  return true;
}

// Made elsewhere, and moved when it is whole.
bool move_in(AddressRange& range, std::span<const std::byte> content,
             int protection) {
  std::size_t alignment = range.bytes < kHugePage ? kPage : kHugePage;
  std::size_t bytes = range.bytes + alignment;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return false;
  Row row{static_cast<std::byte*>(mapped),
          static_cast<std::byte*>(mapped) + bytes};
  std::byte* made = row.take(range.bytes, alignment);
  if (alignment == kHugePage) (void)madvise(made, range.bytes, MADV_HUGEPAGE);
  std::memcpy(made, content.data(), content.size());
  bool moved =
      mprotect(made, range.bytes, protection) == 0 &&
      mremap(made, range.bytes, range.bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
             range.address) != MAP_FAILED;
  auto* begin = static_cast<std::byte*>(mapped);
  if (!moved) {
    munmap(begin, bytes);
    return false;
  }
  if (made > begin) munmap(begin, static_cast<std::size_t>(made - begin));
  if (row.end > row.next) {
    munmap(row.next, static_cast<std::size_t>(row.end - row.next));
  }
  return true;
}

// Another thread may be reading the range: it faults until all is there.
bool fill(AddressRange& range, std::span<const std::byte> content,
          int protection) {
  if (range.bytes <= kSmallBytes && write_behind(range.address, content) &&
      mprotect(range.address, range.bytes, protection) == 0) {
    return true;
  }
  return move_in(range, content, protection);
}

// Of put_content(): in the range, or where it was moved.
struct Content {
  ~Content() {
    if (at == range->address) {
      close_range(*range);
      range->has_content = false;
    } else {
      munmap(at, range->bytes);
    }
  }

  std::shared_ptr<AddressRange> range;
  std::byte* at;
  Reservation paid;
};

void drop_copy(AddressRange& range) ZINF_REQUIRES(copies().mutex) {
  if (!range.has_copy.exchange(false)) return;
  copies().ranges.remove(&range);
  range.copy_paid = {};
  close_range(range);
}

std::byte* addresses_for(std::size_t range_bytes, std::size_t bytes) {
  std::byte* address = take_addresses(range_bytes);
  if (address != nullptr) return address;
  throw Error(Status::error(
      Code::kUnsupported,
      strf("no addresses are left for a tensor of %zu bytes: zinf reserves "
           "them without memory, raise the limit of ulimit -v",
           bytes)));
}

std::shared_ptr<AddressRange> make_range(std::size_t bytes) {
  std::size_t whole = align_up(bytes + 1, kPage);
  return std::shared_ptr<AddressRange>(
      new AddressRange{.address = addresses_for(whole, bytes),
                       .bytes = whole,
                       .content_bytes = bytes});
}

// Its server, and the range, or none.
std::pair<Sentinel*, std::size_t> find(std::byte* address) {
  Ranges& all = ranges();
  MutexLock lock(all.mutex);
  auto after = all.used.upper_bound(address);
  if (after == all.used.begin()) return {};
  auto [begin, found] = *std::prev(after);
  bool inside = address < begin + found.second;
  return inside ? found : std::pair<Sentinel*, std::size_t>();
}

bool is_sentinel(std::byte* address) { return find(address).first != nullptr; }

}  // namespace

void install_fault_handler() {
  MutexLock lock(handler_mutex);
  if (is_first()) return;
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  // The handler reads from disks: further signals and its own faults may come.
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  ZINF_CHECK(sigaction(SIGSEGV, &action, &previous) == 0, "sigaction");
}

void remove_fault_handler() {
  MutexLock lock(handler_mutex);
  if (!is_first()) return;
  ZINF_CHECK(sigaction(SIGSEGV, &previous, nullptr) == 0, "sigaction");
}

AddressRange::~AddressRange() {
  Ranges& all = ranges();
  MutexLock lock(all.mutex);
  all.free.emplace(bytes, address);
}

Sentinel::Sentinel(std::size_t bytes, FaultServer& server)
    : server_(server), range_(make_range(bytes)) {
  Ranges& all = ranges();
  MutexLock lock(all.mutex);
  all.used[range_->address] = {this, range_->bytes};
}

Sentinel::~Sentinel() {
  clear();
  Ranges& all = ranges();
  MutexLock lock(all.mutex);
  all.used.erase(range_->address);
}

void* Sentinel::address() const { return range_->address; }
bool Sentinel::has_copy() const { return range_->has_copy; }
bool Sentinel::has_content() const { return range_->has_content; }
std::size_t Sentinel::memory_bytes() const {
  return align_up(range_->content_bytes, kPage);
}
std::uint64_t Sentinel::num_faults() { return faults; }

void Sentinel::clear() {
  if (!range_->has_copy) return;
  MutexLock lock(copies().mutex);
  drop_copy(*range_);
}

bool Sentinel::put_copy(std::span<const std::byte> content, Touch touch,
                        Reservation paid) {
  int write = touch == Touch::kWrite ? PROT_WRITE : PROT_NONE;
  clear();
  if (!fill(*range_, content, PROT_READ | write)) return false;
  ++faults;
  MutexLock lock(copies().mutex);
  range_->copy_paid = std::move(paid);
  range_->has_copy = true;
  copies().ranges.push_back(range_.get());
  return true;
}

std::uint64_t Sentinel::drop_copies(std::uint64_t bytes) {
  MutexLock lock(copies().mutex);
  std::uint64_t given = 0;
  while (given < bytes && !copies().ranges.empty()) {
    AddressRange& oldest = *copies().ranges.front();
    given += oldest.copy_paid.bytes();
    drop_copy(oldest);
  }
  return given;
}

Block Sentinel::put_content(std::span<const std::byte> content,
                            Reservation paid) {
  clear();
  if (!fill(*range_, content, PROT_READ | PROT_WRITE)) return {};
  range_->has_content = true;
  std::shared_ptr<Content> owner(
      new Content{range_, range_->address, std::move(paid)});
  return {{range_->address, range_->content_bytes}, std::move(owner)};
}

bool Sentinel::take_away(Block& block) {
  ZINF_CHECK(block.bytes.data() == range_->address, "another block");
  if (mprotect(range_->address, range_->bytes, PROT_NONE) != 0) return false;
  void* moved = mremap(range_->address, range_->bytes, range_->bytes,
                       MREMAP_MAYMOVE | MREMAP_DONTUNMAP, nullptr);
  if (moved == MAP_FAILED ||
      mprotect(moved, range_->bytes, PROT_READ | PROT_WRITE) != 0) {
    ZINF_CHECK(moved == MAP_FAILED, "mprotect of %zu bytes", range_->bytes);
    int open = mprotect(range_->address, range_->bytes, PROT_READ | PROT_WRITE);
    ZINF_CHECK(open == 0, "mprotect of %zu bytes", range_->bytes);
    return false;
  }
  auto* content = static_cast<Content*>(block.owner.get());
  content->at = static_cast<std::byte*>(moved);
  if (range_->bytes > kSmallBytes) close_range(*range_);
  range_->has_content = false;
  block.bytes = {content->at, range_->content_bytes};
  return true;
}

bool serve_fault(std::byte* address, Touch touch) {
  Sentinel* sentinel = find(address).first;
  return sentinel != nullptr && sentinel->server_.serve_fault(touch);
}

}  // namespace zinf
