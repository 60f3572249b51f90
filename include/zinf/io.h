// Asynchronous file I/O for large transfers: zinf's DeepNVMe.
//
// An Io owns one queue to the disk and one thread that feeds it. Anybody may
// submit; a request of any size is cut into blocks, many of which are in flight
// at once. Every completion is checked before anybody sees it: short transfers
// are continued, EINTR and EAGAIN are retried, everything else becomes a Status
// with operation, path, offset, wanted, got and errno.
//
//   ZINF_ASSIGN(auto io, io::Io::create({}));
//   ZINF_ASSIGN(auto file, io->open(path, {.mode = io::Open::kCreate,
//                                          .bytes = size}));
//   io::Request write = io->write(file, 0, data);
//   ZINF_TRY(write.wait());
//   ZINF_TRY(io->sync(file).wait());
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zinf/status.h"

namespace zinf::io {

class MemoryDisk;  // zinf/memory_disk.h

enum class Backend : std::uint8_t {
  kAuto,     // io_uring where the system allows it, else threads
  kUring,    // io_uring
  kThreads,  // pread and pwrite on a few threads
  kMemory,   // files in memory: for tests
};
std::string_view backend_name(Backend backend);  // "io_uring", ...
Result<Backend> parse_backend(std::string_view name);

enum class Caching : std::uint8_t {
  kDirect,    // O_DIRECT where the file system has it
  kBuffered,  // through the page cache
};

// The last two are of whole files: a new one, and another size of an old one.
enum class Operation : std::uint8_t { kRead, kWrite, kSync, kResize, kCreate };
inline constexpr std::size_t kNumOperations = 5;
std::string_view operation_name(Operation operation);  // "read", ...

// A fault to inject under the checks, as a failing disk would show it.
struct Fault {
  enum class Kind : std::uint8_t {
    kError,  // nothing is transferred, `errnum` comes back
    kShort,  // half is transferred, its count comes back
    kTorn,   // half is transferred, `errnum` comes back
    kLost,   // nothing is transferred, but success comes back
    kFlip,   // reads only: all is transferred, but one bit is another
    kDelay,  // the completion comes `delay` later
    kRate,   // completions come no faster than `bytes_per_second`; always on
    kKill,   // the process ends at once, as by kill -9
  };
  Kind kind = Kind::kError;
  Operation on = Operation::kRead;
  int errnum = 5;  // EIO

  // Fires at the nth operation of its sort on this Io, counted from 1 (and, if
  // `and_after`, at all later ones); with nth = 0, at each with `probability`.
  std::uint64_t nth = 0;
  bool and_after = false;
  double probability = 0;
  std::uint64_t seed = 1;
  std::chrono::microseconds delay{0};
  double bytes_per_second = 0;
};

struct Options {
  Backend backend = Backend::kAuto;
  Caching caching = Caching::kDirect;
  std::vector<Fault> faults = {};  // for tests
  // What Backend::kMemory keeps its files in; none: a disk of its own.
  std::shared_ptr<MemoryDisk> disk = {};

  // A request is cut into blocks of this many bytes: a multiple of 4096.
  std::size_t block_bytes = std::size_t{1} << 20;
  // Blocks in flight at once.
  int depth = 16;
  // Threads of Backend::kThreads.
  int threads = 4;

  // Every problem in one text, or ok.
  Status validate() const;
};

enum class Open : std::uint8_t {
  kExisting,  // must exist; its size stays
  kReadOnly,  // the same, and nothing is written: for read-only file systems
  kCreate,    // must not exist; gets `bytes`, preallocated
  kReplace,   // as kCreate, but an existing regular file is emptied first; it
              // stays, empty, when there is no room for the new size
};

struct OpenOptions {
  Open mode = Open::kExisting;
  std::uint64_t bytes = 0;  // for new files: at least 1
  std::string name = {};    // for messages; empty: the path
  // A directory's descriptor: the path is a name in it, and no symbolic link
  // (kReadOnly follows one); -1: the path is a path.
  int directory = -1;
};

namespace detail {
struct FileState;
struct RequestState;
class Pump;
}  // namespace detail

// An open file; only resize() changes its size. Move-only; closing waits for
// its requests. One thread at a time; it may be used by many for submitting. A
// default or closed one is empty, of zero bytes.
class File {
 public:
  File() = default;
  ~File() { close(); }
  File(File&& other) noexcept = default;
  File& operator=(File&& other) noexcept;

  const std::string& path() const;
  std::uint64_t bytes() const;

  // Transfers whose offset, size and memory are multiples of this go straight
  // to the disk; the rest go through the page cache, correct but slower.
  static constexpr std::size_t kAlignment = 4096;
  bool direct() const;  // false: everything goes through the page cache

  void close();

 private:
  friend class Io;
  explicit File(std::shared_ptr<detail::FileState> state);
  std::shared_ptr<detail::FileState> state_;
};

// One submitted request. Move-only. Its memory must stay until it is done; the
// destructor of an unfinished request waits for it, and logs an error that
// nobody has asked for. One thread at a time.
class [[nodiscard]] Request {
 public:
  Request() = default;
  ~Request();
  Request(Request&& other) noexcept = default;
  Request& operator=(Request&& other) noexcept;

  bool done() const;
  Status wait();  // may be called again; gives the same answer

 private:
  friend class Io;
  explicit Request(std::shared_ptr<detail::RequestState> state);
  void finish();
  std::shared_ptr<detail::RequestState> state_;
};

// Waits for all of them; the first error in their order.
Status wait_all(std::span<Request> requests);

// Memory that the kernel has mapped once and for all: less CPU per transfer.
// Move-only; unregisters at destruction. Not active where limits forbid it
// (RLIMIT_MEMLOCK) or the back end has no such thing: transfers work as well.
// One thread at a time.
class Registration {
 public:
  Registration() = default;
  ~Registration() { release(); }
  Registration(Registration&& other) noexcept = default;
  Registration& operator=(Registration&& other) noexcept;

  bool active() const { return !slots_.empty(); }
  void release();

 private:
  friend class Io;
  std::shared_ptr<detail::Pump> pump_;
  std::vector<int> slots_;
};

// Counters since creation.
struct Stats {
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t blocks = 0;           // transfers given to the back end
  std::uint64_t buffered_blocks = 0;  // of these, through the page cache
  std::uint64_t joined = 0;           // requests that went with a neighbour's
  std::uint64_t continued = 0;        // short transfers that were continued
  std::uint64_t retried = 0;          // EINTR and EAGAIN
  std::uint64_t turns = 0;            // of the queue's thread
  // How long at least one read, or write, was with the back end.
  std::uint64_t read_ns = 0;
  std::uint64_t write_ns = 0;
  std::uint64_t cpu_ns = 0;  // of the queue's thread
};

// While one lives, small requests of its thread (below Options::block_bytes),
// to every Io, are held back and begin together at its end: neighbours in a
// file become one transfer. It holds nobody up: a wait for any request of the
// Io, on any thread, lets them go, and so do syncs of others, drain(), the
// close of a file and shutdown(). One inside another does nothing. Ends on the
// thread that made it.
class Plug {
 public:
  Plug();
  ~Plug();
  Plug(const Plug&) = delete;
  Plug& operator=(const Plug&) = delete;

 private:
  friend class detail::Pump;
  std::vector<std::shared_ptr<detail::Pump>> pumps_;  // that hold some
};

// Thread-safe.
class Io {
 public:
  static Result<std::unique_ptr<Io>> create(const Options& options);
  ~Io();  // shutdown()
  Io(const Io&) = delete;
  Io& operator=(const Io&) = delete;

  // A new file has mode 0600 and its whole size is reserved on the disk; when
  // that fails (kNoSpace) nothing is left behind.
  Result<File> open(const std::string& path, const OpenOptions& options);
  Status remove(const std::string& path);

  // Gives the file another size: what it grows by is reserved on the disk, and
  // reads as zeros. On failure (kNoSpace) it has the old one. Durable with the
  // next sync. Transfers may be in flight, but none beyond the new end.
  Status resize(const File& file, std::uint64_t bytes);

  // The transfer must lie within the file and not be empty; else the request
  // comes back failed. Overlapping requests in flight have no order.
  Request read(const File& file, std::uint64_t offset,
               std::span<std::byte> into);
  Request write(const File& file, std::uint64_t offset,
                std::span<const std::byte> from);

  // Done when every write submitted to the file before it is done and durable.
  Request sync(const File& file);

  // Waits until no request is pending.
  void drain();

  // Blocks that are not with the disk yet are given up (kCancelled), the others
  // waited for. Later submissions come back cancelled.
  void shutdown();

  Registration register_memory(std::span<std::byte> memory);

  Backend backend() const;            // never kAuto
  const std::string& reason() const;  // why this one, for people
  const Options& options() const;
  Stats stats() const;

 private:
  explicit Io(std::shared_ptr<detail::Pump> pump);
  Request submit(Operation operation, const File& file, std::uint64_t offset,
                 std::byte* data, std::size_t bytes);
  std::shared_ptr<detail::Pump> pump_;
};

}  // namespace zinf::io
