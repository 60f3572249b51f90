#include "src/mem/virtual_range.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "zinf/budget.h"
#include "zinf/bytes.h"

namespace zinf {
namespace {

// The size of this process's address space now; 0 when /proc is not there.
std::size_t mapped_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "re");
  if (file == nullptr) return 0;
  unsigned long long pages = 0;
  int found = std::fscanf(file, "%llu", &pages);
  std::fclose(file);
  return found == 1 ? pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE))
                    : 0;
}

}  // namespace

VirtualRange& VirtualRange::operator=(VirtualRange&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

VirtualRange::~VirtualRange() {
  if (base_ == nullptr) return;
  ZINF_CHECK(munmap(base_, bytes_) == 0, "munmap of %zu bytes: errno %d",
             bytes_, errno);
}

Result<VirtualRange> VirtualRange::map(std::size_t bytes, std::size_t alignment,
                                       int protection) {
  bytes = align_up(bytes, kPage);
  std::size_t padded = bytes + (alignment > kPage ? alignment : 0);
  if (bytes == 0 || padded > kAddressSpaceBytes) {
    return Status::error(
        Code::kInvalid,
        strf("map %zu bytes: not in 1 to %llu", bytes,
             static_cast<unsigned long long>(kAddressSpaceBytes)));
  }
  void* mapped = mmap(nullptr, padded, protection,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    return Status::system("mmap", format_bytes(padded), errno);
  }
  auto begin = reinterpret_cast<std::uintptr_t>(mapped);
  std::uintptr_t aligned = align_up(begin, std::uintptr_t{alignment});
  std::uintptr_t end = aligned + bytes;
  if (aligned > begin) munmap(mapped, aligned - begin);
  if (begin + padded > end) {
    munmap(reinterpret_cast<void*>(end), begin + padded - end);
  }
  return VirtualRange(reinterpret_cast<std::byte*>(aligned), bytes);
}

Result<VirtualRange> VirtualRange::reserve(std::size_t bytes,
                                           std::size_t alignment) {
  return map(bytes, alignment, PROT_NONE);
}

Result<VirtualRange> VirtualRange::allocate(std::size_t bytes,
                                            std::size_t alignment) {
  return map(bytes, alignment, PROT_READ | PROT_WRITE);
}

Status VirtualRange::make_writable(std::size_t offset, std::size_t bytes) {
  if (mprotect(base_ + offset, bytes, PROT_READ | PROT_WRITE) == 0) return {};
  return Status::system("mprotect", format_bytes(bytes), errno);
}

void VirtualRange::advise_huge(std::size_t offset, std::size_t bytes) {
  [[maybe_unused]] int refused = madvise(base_ + offset, bytes, MADV_HUGEPAGE);
}

bool VirtualRange::advise_small(std::size_t offset, std::size_t bytes) {
  return madvise(base_ + offset, bytes, MADV_NOHUGEPAGE) == 0 ||
         errno != ENOMEM;
}

void VirtualRange::discard_part(std::size_t offset, std::size_t bytes) {
  // MADV_FREE of a part splits the page at once; where it is refused the memory
  // comes back later.
  [[maybe_unused]] int refused = madvise(base_ + offset, bytes, MADV_FREE);
  discard(offset, bytes);
}

void VirtualRange::shrink(std::size_t bytes) {
  bytes = align_up(bytes, kPage);
  if (bytes >= bytes_) return;
  discard_part(bytes, bytes_ - bytes);
  ZINF_CHECK(munmap(base_ + bytes, bytes_ - bytes) == 0,
             "munmap of %zu bytes: errno %d", bytes_ - bytes, errno);
  bytes_ = bytes;
}

void VirtualRange::discard(std::size_t offset, std::size_t bytes) {
  if (madvise(base_ + offset, bytes, MADV_DONTNEED) == 0) return;
  // Locked pages (the program may have called mlockall) are not given back.
  munlock(base_ + offset, bytes);
  ZINF_CHECK(madvise(base_ + offset, bytes, MADV_DONTNEED) == 0,
             "madvise(DONTNEED) of %zu bytes: errno %d", bytes, errno);
}

std::size_t decent_reserve_bytes() {
  auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES));
  std::size_t wanted =
      4 * pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    std::size_t mapped = mapped_bytes();
    std::size_t left = limit.rlim_cur > mapped ? limit.rlim_cur - mapped : 0;
    wanted = std::min(wanted, left / 2);
  }
  return align_down(std::min<std::size_t>(wanted, kAddressSpaceBytes / 4),
                    kHugePage);
}

}  // namespace zinf
