#include "zinf/disk.h"

#include <fcntl.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "src/base/strf.h"
#include "src/io/scratch.h"
#include "zinf/io.h"

namespace zinf::io {
namespace {

struct KnownFileSystem {
  long magic;
  const char* name;
  bool network;
};

constexpr std::array<KnownFileSystem, 16> kKnown = {{
    {0xEF53, "ext4", false},
    {0x58465342, "xfs", false},
    {0x9123683E, "btrfs", false},
    {0xF2F52010, "f2fs", false},
    {0x2FC12FC1, "zfs", false},
    {0x01021994, "tmpfs", false},
    {0x858458F6, "ramfs", false},
    {0x794C7630, "overlay", false},
    {0x6969, "nfs", true},
    {0xFF534D42, "cifs", true},
    {0xFE534D42, "smb2", true},
    {0x01021997, "9p", true},
    {0x00C36400, "ceph", true},
    {0x0BD00BD0, "lustre", true},
    {0x47504653, "gpfs", true},
    {0x65735546, "fuse", true},
}};

// Whether a page can be written and read with O_DIRECT.
bool direct_works(const Scratch& scratch) {
  int fd = open(scratch.path().c_str(), O_RDWR | O_CLOEXEC | O_DIRECT);
  if (fd < 0) return false;
  std::unique_ptr<void, decltype(&std::free)> page(
      std::aligned_alloc(File::kAlignment, File::kAlignment), &std::free);
  constexpr auto kBytes = static_cast<ssize_t>(File::kAlignment);
  bool works = pwrite(fd, page.get(), File::kAlignment, 0) == kBytes &&
               pread(fd, page.get(), File::kAlignment, 0) == kBytes;
  close(fd);
  return works;
}

}  // namespace

Result<Disk> inspect_disk(const std::string& directory) {
  struct statfs info{};
  if (statfs(directory.c_str(), &info) != 0) {
    return Status::system("inspect", directory, errno);
  }
  Disk disk;
  disk.file_system =
      strf("type 0x%lx", static_cast<unsigned long>(info.f_type));
  for (const KnownFileSystem& known : kKnown) {
    if (known.magic != info.f_type) continue;
    disk.file_system = known.name;
    disk.network = known.network;
  }
  disk.in_memory = disk.file_system == "tmpfs" || disk.file_system == "ramfs";
  auto unit = static_cast<std::uint64_t>(info.f_frsize);
  disk.total_bytes = info.f_blocks * unit;
  disk.free_bytes = info.f_bavail * unit;
  ZINF_ASSIGN(Scratch scratch, Scratch::create(directory, File::kAlignment));
  disk.direct = !disk.in_memory && direct_works(scratch);
  return disk;
}

Status probe_uring() {
  Result<std::unique_ptr<Io>> io = Io::create({.backend = Backend::kUring});
  return io.status();
}

}  // namespace zinf::io
