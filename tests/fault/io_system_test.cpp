// How the I/O library meets systems that say no: no io_uring, no locked memory,
// a full disk, a path that may not be written, a file system without O_DIRECT.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <filesystem>

#include "src/base/align.h"
#include "tests/support/buffer.h"
#include "tests/support/child.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_dir.h"
#include "zinf/disk.h"
#include "zinf/io.h"
#include "zinf/io_bench.h"

namespace zinf::io {
namespace {

constexpr uid_t kNobody = 65534;

// As container profiles do: the system call exists but is forbidden.
bool forbid_io_uring() {
  std::array<sock_filter, 4> code = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  sock_fprog program = {code.size(), code.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// A small file system of the child's own at `path`.
bool mount_tmpfs(const std::string& path, const char* options,
                 unsigned long flags = 0) {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("zinf", path.c_str(), "tmpfs", flags, options) == 0;
}

std::string round_trip(Io& io, const std::string& path) {
  Result<File> file = io.open(path, {.mode = Open::kCreate, .bytes = kMiB});
  if (!file.ok()) return file.status().text();
  Buffer out(kMiB, 1);
  Buffer in(kMiB, 2);
  Status status = io.write(*file, 0, out.span()).wait();
  if (status.ok()) status = io.read(*file, 0, in.span()).wait();
  if (!status.ok()) return status.text();
  return in == out ? "" : "other bytes came back";
}

TEST(IoSystem, FallsBackToThreadsWhereIoUringIsForbidden) {
  TempDir dir;
  ZINF_EXPECT_CHILD_OK([&]() -> std::string {
    if (!forbid_io_uring()) return "skip";
    if (probe_uring().ok()) return "io_uring was not forbidden";
    Result<std::unique_ptr<Io>> forced =
        Io::create({.backend = Backend::kUring});
    if (forced.ok()) return "a forced io_uring must not fall back";
    testing::internal::CaptureStderr();
    Result<std::unique_ptr<Io>> io = Io::create({});
    std::string line = testing::internal::GetCapturedStderr();
    if (!io.ok()) return io.status().text();
    if (io.value()->backend() != Backend::kThreads) return "not threads";
    if (line.find("no io_uring") == std::string::npos ||
        line.find("EPERM") == std::string::npos) {
      return "the log does not say why: " + line;
    }
    return round_trip(*io.value(), dir.file("data"));
  });
}

TEST(IoSystem, RunsWithoutRegisteredMemoryUnderAMemlockLimit) {
  if (!probe_uring().ok()) GTEST_SKIP() << probe_uring().text();
  TempDir dir;
  std::filesystem::permissions(dir.path(), std::filesystem::perms::all);
  ZINF_EXPECT_CHILD_OK([&]() -> std::string {
    rlimit limit = {kMiB, kMiB};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "skip";
    if (geteuid() == 0 && setuid(kNobody) != 0) return "skip";
    Result<std::unique_ptr<Io>> io = Io::create({.backend = Backend::kUring});
    if (!io.ok()) return io.status().text();
    Buffer memory(64 * kMiB);
    testing::internal::CaptureStderr();
    Registration registration = io.value()->register_memory(memory.span());
    std::string line = testing::internal::GetCapturedStderr();
    if (registration.active()) return "registered beyond the limit";
    if (line.find("RLIMIT_MEMLOCK") == std::string::npos) {
      return "the log does not say what to do: " + line;
    }
    return round_trip(*io.value(), dir.file("data"));
  });
}

TEST(IoSystem, AFullDiskIsRefusedAtCreationAndLeavesNothing) {
  TempDir dir;
  ZINF_EXPECT_CHILD_OK([&]() -> std::string {
    if (!mount_tmpfs(dir.path(), "size=8m")) return "skip";
    Result<std::unique_ptr<Io>> io = Io::create({});
    if (!io.ok()) return io.status().text();
    Result<File> file = io.value()->open(
        dir.file("big"), {.mode = Open::kCreate, .bytes = 64 * kMiB});
    if (file.ok()) return "64 MiB fit into 8";
    if (file.status().code() != Code::kNoSpace) return file.status().text();
    if (std::filesystem::exists(dir.file("big"))) return "a file is left";
    Result<Bench> bench = Bench::in_directory(dir.path(), 64 * kMiB);
    if (bench.status().code() != Code::kNoSpace) return bench.status().text();
    return round_trip(*io.value(), dir.file("small"));  // also: buffered works
  });
}

TEST(IoSystem, AnOldFileStaysWhenThereIsNoRoomToReplaceIt) {
  TempDir dir;
  ZINF_EXPECT_CHILD_OK([&]() -> std::string {
    if (!mount_tmpfs(dir.path(), "size=8m")) return "skip";
    Result<std::unique_ptr<Io>> io = Io::create({});
    std::string small = round_trip(*io.value(), dir.file("old"));
    if (!small.empty()) return small;
    Result<File> file = io.value()->open(
        dir.file("old"), {.mode = Open::kReplace, .bytes = 64 * kMiB});
    if (file.status().code() != Code::kNoSpace) return file.status().text();
    return std::filesystem::exists(dir.file("old")) ? "" : "it was removed";
  });
}

TEST(IoSystem, RunningOutOfDescriptorsLeavesNoFile) {
  if (kSanitized) GTEST_SKIP() << "UBSan needs descriptors of its own";
  TempDir dir;
  ZINF_EXPECT_CHILD_OK([&]() -> std::string {
    Result<std::unique_ptr<Io>> io = Io::create({});
    if (!io.ok()) return io.status().text();
    int next = dup(0);  // one more may be opened, the direct one not
    close(next);
    rlimit limit = {static_cast<rlim_t>(next) + 1,
                    static_cast<rlim_t>(next) + 1};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return "skip";
    Result<File> file = io.value()->open(
        dir.file("data"), {.mode = Open::kCreate, .bytes = kMiB});
    if (file.status().errnum() != EMFILE) return file.status().text();
    return std::filesystem::exists(dir.file("data")) ? "a file is left" : "";
  });
}

TEST(IoSystem, ASystemWithoutMoreThreadsIsAnError) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need the address space";
  ZINF_EXPECT_CHILD_OK([]() -> std::string {
    rlimit limit = {std::size_t{128} << 20, std::size_t{128} << 20};
    if (setrlimit(RLIMIT_AS, &limit) != 0) return "skip";
    Result<std::unique_ptr<Io>> io =
        Io::create({.backend = Backend::kThreads, .threads = 256});
    if (io.ok()) return "256 threads fit into 128 MiB";
    return io.status().text().find("start a thread") == std::string::npos
               ? io.status().text()
               : "";
  });
}

TEST(IoSystem, AFileSystemInMemoryIsRecognised) {
  TempDir dir;
  ZINF_EXPECT_CHILD_OK([&]() -> std::string {
    if (!mount_tmpfs(dir.path(), "size=8m")) return "skip";
    Result<Disk> disk = inspect_disk(dir.path());
    if (!disk.ok()) return disk.status().text();
    if (disk->file_system != "tmpfs" || !disk->in_memory || disk->direct) {
      return "not seen as tmpfs: " + disk->file_system;
    }
    Result<std::unique_ptr<Io>> io = Io::create({});
    Result<File> file = io.value()->open(
        dir.file("data"), {.mode = Open::kCreate, .bytes = kMiB});
    if (!file.ok()) return file.status().text();
    return file->direct() ? "direct I/O on tmpfs" : "";
  });
}

TEST(IoSystem, AReadOnlyPathIsSaid) {
  TempDir dir;
  ZINF_EXPECT_CHILD_OK([&]() -> std::string {
    if (!mount_tmpfs(dir.path(), "size=8m", MS_RDONLY)) return "skip";
    Result<std::unique_ptr<Io>> io = Io::create({});
    Result<File> file = io.value()->open(
        dir.file("data"), {.mode = Open::kCreate, .bytes = kMiB});
    if (file.ok()) return "created on a read-only file system";
    if (file.status().errnum() != EROFS) return file.status().text();
    Result<Disk> disk = inspect_disk(dir.path());
    if (disk.ok()) return "a read-only disk was accepted";
    Status saved = save_profile(dir.path(), {});
    return saved.errnum() == EROFS ? "" : saved.text();
  });
}

TEST(IoSystem, ADirectoryOfAnotherUserIsSaid) {
  TempDir dir;
  std::filesystem::permissions(dir.path(), std::filesystem::perms::owner_all);
  ZINF_EXPECT_CHILD_OK([&]() -> std::string {
    if (geteuid() != 0 || setuid(kNobody) != 0) return "skip";
    Result<Bench> bench = Bench::in_directory(dir.path(), kMiB);
    if (bench.ok()) return "measured in a forbidden directory";
    return bench.status().code() == Code::kPermission ? ""
                                                      : bench.status().text();
  });
}

}  // namespace
}  // namespace zinf::io
