// Preloaded into a process: records, in order, what it changes below a
// directory, for tests that ask what a power loss after each change would
// leave. Several processes may share a record.
//
//   ZINF_RECORD_BELOW  the directory
//   ZINF_RECORD        the record, a file elsewhere: a line of JSON per change
//   ZINF_RECORD_FAIL   from this change on all but removals fail with EIO
//   ZINF_RECORD_KILL   the process is killed after this change
//   ZINF_RECORD_NAMED  there is no O_TMPFILE
//
// io_uring is forbidden in such a process: its writes would not be seen.
#undef _FORTIFY_SOURCE  // it would have functions of these names
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdarg.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

using Inode = unsigned long long;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

const std::string& below() {
  static const std::string path = variable("ZINF_RECORD_BELOW");
  return path;
}

template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) static const auto real_##name = real<decltype(&name)>(#name)

void forbid_io_uring() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program = {sizeof code / sizeof *code, code};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    std::fprintf(stderr, "disk_recorder: cannot forbid io_uring\n");
    std::abort();
  }
}
__attribute__((constructor)) void start() { forbid_io_uring(); }

// Of a descriptor; "" when it is not below the directory.
std::string path_of(int fd) {
  if (below().empty()) return "";
  char path[PATH_MAX];
  std::string link = "/proc/self/fd/" + std::to_string(fd);
  ssize_t size = readlink(link.c_str(), path, sizeof path);
  if (size <= 0) return "";
  std::string found(path, static_cast<std::size_t>(size));
  return found.starts_with(below()) ? found : "";
}

// The directory and the name that a path means, the directory's inode 0 when
// it is not below.
struct Entry {
  Entry(int directory, const char* path) {
    std::string whole = path;
    while (whole.size() > 1 && whole.back() == '/') whole.pop_back();
    std::size_t slash = whole.rfind('/');
    name = slash == std::string::npos ? whole : whole.substr(slash + 1);
    std::string parent = slash == std::string::npos ? "."
                         : slash == 0               ? "/"
                                                    : whole.substr(0, slash);
    int fd = static_cast<int>(syscall(SYS_openat, directory, parent.c_str(),
                                      O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (fd < 0) return;
    struct stat info{};
    if (!path_of(fd).empty() && fstat(fd, &info) == 0) inode = info.st_ino;
    syscall(SYS_close, fd);
  }
  Inode inode = 0;
  std::string name;
};

Inode inode_at(int directory, const char* path) {
  struct stat info{};
  return fstatat(directory, path, &info, AT_SYMLINK_NOFOLLOW) == 0 ? info.st_ino
                                                                   : 0;
}

Inode inode_of(int fd) {
  struct stat info{};
  return fstat(fd, &info) == 0 ? info.st_ino : 0;
}

// One change at a time, of all processes: held from before it until it stands
// in the record.
class Change {
 public:
  Change() : lock_(mutex()) {
    fd_ = static_cast<int>(
        syscall(SYS_openat, AT_FDCWD, variable("ZINF_RECORD").c_str(),
                O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
    if (fd_ < 0) std::abort();
    flock(fd_, LOCK_EX);
  }
  ~Change() { syscall(SYS_close, fd_); }

  // Whether the disk has died before it.
  bool fails() {
    if (!has_come("ZINF_RECORD_FAIL")) return false;
    note("\"op\": \"failed\"");
    errno = EIO;
    return true;
  }
  void note(const std::string& fields) {
    std::string line = "{" + fields + "}\n";
    syscall(SYS_write, fd_, line.data(), line.size());
    if (has_come("ZINF_RECORD_KILL")) kill(getpid(), SIGKILL);
  }

 private:
  bool has_come(const char* name) {
    std::string number = variable(name);
    if (number.empty()) return false;
    long lines = 0;
    char text[4096];
    off_t at = 0;
    while (true) {
      ssize_t got = static_cast<ssize_t>(
          syscall(SYS_pread64, fd_, text, sizeof text, at));
      if (got <= 0) break;
      for (ssize_t i = 0; i < got; ++i) lines += text[i] == '\n';
      at += got;
    }
    return lines >= std::atol(number.c_str());
  }
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  std::lock_guard<std::mutex> lock_;
  int fd_;
};

std::string op(const char* name, Inode inode) {
  return std::string("\"op\": \"") + name +
         "\", \"inode\": " + std::to_string(inode);
}

std::string at(const Entry& entry, const char* prefix = "") {
  return std::string(", \"") + prefix +
         "dir\": " + std::to_string(entry.inode) + ", \"" + prefix +
         "name\": \"" + entry.name + "\"";
}

std::string hex(const iovec* parts, int count, std::size_t most) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (int i = 0; i < count; ++i) {
    const auto* bytes = static_cast<const unsigned char*>(parts[i].iov_base);
    for (std::size_t j = 0; j < parts[i].iov_len && most > 0; ++j, --most) {
      text += digits[bytes[j] >> 4];
      text += digits[bytes[j] & 15];
    }
  }
  return text;
}

int open_recorded(int directory, const char* path, int flags, mode_t mode) {
  auto open_it = [&] {
    return static_cast<int>(syscall(SYS_openat, directory, path, flags, mode));
  };
  bool nameless = (flags & O_TMPFILE) == O_TMPFILE;
  bool changes = nameless || (flags & (O_CREAT | O_TRUNC)) != 0;
  if (below().empty() || !changes) return open_it();
  Entry entry(directory, path);
  if (nameless) {
    if (!variable("ZINF_RECORD_NAMED").empty()) {
      errno = EOPNOTSUPP;
      return -1;
    }
    int fd = open_it();
    if (fd < 0 || path_of(fd).empty()) return fd;
    Change change;
    if (change.fails()) {
      syscall(SYS_close, fd);
      errno = EIO;
      return -1;
    }
    change.note(op("tmpfile", inode_of(fd)));
    return fd;
  }
  if (entry.inode == 0) return open_it();
  Change change;
  Inode before = inode_at(directory, path);
  if (before == 0 && change.fails()) return -1;
  int fd = open_it();
  if (fd < 0) return fd;
  if (before == 0) {
    change.note(op("create", inode_of(fd)) + at(entry));
  } else if ((flags & O_TRUNC) != 0) {
    change.note(op("size", inode_of(fd)) + ", \"bytes\": 0");
  }
  return fd;
}

mode_t mode_of(int flags, va_list arguments) {
  bool has_mode = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return has_mode ? va_arg(arguments, mode_t) : 0;
}

int rename_recorded(int from_dir, const char* from, int to_dir, const char* to,
                    unsigned flags) {
  auto rename_it = [&] {
    return static_cast<int>(
        syscall(SYS_renameat2, from_dir, from, to_dir, to, flags));
  };
  Entry source(from_dir, from);
  Entry target(to_dir, to);
  if (source.inode == 0 && target.inode == 0) return rename_it();
  Change change;
  if (change.fails()) return -1;
  Inode inode = inode_at(from_dir, from);
  int result = rename_it();
  if (result == 0) {
    change.note(op("rename", inode) + at(source) + at(target, "to_"));
  }
  return result;
}

int remove_recorded(int directory, const char* path, int flags) {
  auto remove_it = [&] {
    return static_cast<int>(syscall(SYS_unlinkat, directory, path, flags));
  };
  Entry entry(directory, path);
  if (entry.inode == 0) return remove_it();
  Change change;
  int result = remove_it();
  if (result == 0) change.note(op("remove", 0) + at(entry));
  return result;
}

int mkdir_recorded(int directory, const char* path, mode_t mode) {
  Entry entry(directory, path);
  auto make_it = [&] {
    return static_cast<int>(syscall(SYS_mkdirat, directory, path, mode));
  };
  if (entry.inode == 0) return make_it();
  Change change;
  if (change.fails()) return -1;
  int result = make_it();
  if (result == 0) {
    change.note(op("mkdir", inode_at(directory, path)) + at(entry));
  }
  return result;
}

int sync_recorded(int fd, long number) {
  auto sync_it = [&] { return static_cast<int>(syscall(number, fd)); };
  if (path_of(fd).empty()) return sync_it();
  Change change;
  if (change.fails()) return -1;
  int result = sync_it();
  if (result == 0) change.note(op("sync", inode_of(fd)));
  return result;
}

template <typename Resize>
int resize_recorded(int fd, Resize resize) {
  if (path_of(fd).empty()) return resize();
  Change change;
  if (change.fails()) return -1;
  int result = resize();
  struct stat info{};
  if (result == 0 && fstat(fd, &info) == 0) {
    change.note(op("size", info.st_ino) +
                ", \"bytes\": " + std::to_string(info.st_size));
  }
  return result;
}

template <typename Write>
ssize_t write_recorded(int fd, const iovec* parts, int count, off_t offset,
                       Write write) {
  if (path_of(fd).empty()) return write();
  Change change;
  if (change.fails()) return -1;
  ssize_t result = write();
  if (result > 0) {
    change.note(op("write", inode_of(fd)) +
                ", \"offset\": " + std::to_string(offset) + ", \"data\": \"" +
                hex(parts, count, static_cast<std::size_t>(result)) + "\"");
  }
  return result;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_recorded(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_recorded(AT_FDCWD, path, flags, mode);
}
int openat(int directory, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_recorded(directory, path, flags, mode);
}
int openat64(int directory, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_recorded(directory, path, flags, mode);
}

int rename(const char* from, const char* to) noexcept {
  return rename_recorded(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int renameat(int from_dir, const char* from, int to_dir,
             const char* to) noexcept {
  return rename_recorded(from_dir, from, to_dir, to, 0);
}
int renameat2(int from_dir, const char* from, int to_dir, const char* to,
              unsigned flags) noexcept {
  return rename_recorded(from_dir, from, to_dir, to, flags);
}
int linkat(int from_dir, const char* from, int to_dir, const char* to,
           int flags) noexcept {
  auto link_it = [&] {
    return static_cast<int>(
        syscall(SYS_linkat, from_dir, from, to_dir, to, flags));
  };
  Entry target(to_dir, to);
  if (target.inode == 0) return link_it();
  Change change;
  if (change.fails()) return -1;
  int result = link_it();
  if (result == 0) {
    change.note(op("link", inode_at(to_dir, to)) + at(target));
  }
  return result;
}

int unlink(const char* path) noexcept {
  return remove_recorded(AT_FDCWD, path, 0);
}
int rmdir(const char* path) noexcept {
  return remove_recorded(AT_FDCWD, path, AT_REMOVEDIR);
}
int unlinkat(int directory, const char* path, int flags) noexcept {
  return remove_recorded(directory, path, flags);
}
int mkdir(const char* path, mode_t mode) noexcept {
  return mkdir_recorded(AT_FDCWD, path, mode);
}
int mkdirat(int directory, const char* path, mode_t mode) noexcept {
  return mkdir_recorded(directory, path, mode);
}

int fsync(int fd) { return sync_recorded(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_recorded(fd, SYS_fdatasync); }

int ftruncate(int fd, off_t bytes) noexcept {
  return resize_recorded(
      fd, [&] { return static_cast<int>(syscall(SYS_ftruncate, fd, bytes)); });
}
int ftruncate64(int fd, off64_t bytes) noexcept { return ftruncate(fd, bytes); }
int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  return resize_recorded(fd, [&] {
    return static_cast<int>(syscall(SYS_fallocate, fd, mode, offset, bytes));
  });
}
int fallocate64(int fd, int mode, off64_t offset, off64_t bytes) {
  return fallocate(fd, mode, offset, bytes);
}

ssize_t pwritev(int fd, const iovec* parts, int count, off_t offset) {
  REAL(pwritev);
  return write_recorded(fd, parts, count, offset,
                        [&] { return real_pwritev(fd, parts, count, offset); });
}
ssize_t pwritev64(int fd, const iovec* parts, int count, off64_t offset) {
  return pwritev(fd, parts, count, offset);
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  iovec part = {const_cast<void*>(data), bytes};
  return write_recorded(fd, &part, 1, offset, [&] {
    return static_cast<ssize_t>(syscall(SYS_pwrite64, fd, data, bytes, offset));
  });
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  return pwrite(fd, data, bytes, offset);
}
ssize_t write(int fd, const void* data, size_t bytes) {
  iovec part = {const_cast<void*>(data), bytes};
  auto write_it = [&] {
    return static_cast<ssize_t>(syscall(SYS_write, fd, data, bytes));
  };
  if (below().empty() || path_of(fd).empty()) return write_it();
  off_t offset = lseek(fd, 0, SEEK_CUR);
  return write_recorded(fd, &part, 1, offset, write_it);
}

}  // extern "C"
#pragma GCC visibility pop
