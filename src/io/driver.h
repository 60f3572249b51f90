// The seam between the queue (pump.h) and what moves the bytes.
//
// A driver carries out raw operations and reports what the kernel said, without
// checking: bytes moved, or -errno. Everything but wake() is called on the
// pump's thread.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zinf/io.h"

namespace zinf::io {

class FaultInjector;  // zinf/fault_injector.h

// One transfer in flight. Owned by the pump; a driver keeps the pointer between
// start() and the collect() that returns it.
struct RawOp {
  Operation kind = Operation::kRead;
  int file = -1;        // from Driver::open
  bool direct = false;  // offset, bytes and data are aligned
  int slot = -1;        // registered memory that holds data, or -1
  std::uint64_t offset = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  // Where memory is in several pieces: all of them, in the order of the file.
  // Else empty.
  std::vector<iovec> pieces;
  std::int64_t result = 0;  // set by the driver: bytes moved, or -errno
};

inline bool creates(Open mode) {
  return mode == Open::kCreate || mode == Open::kReplace;
}

struct OpenedFile {
  int file = -1;
  std::uint64_t bytes = 0;
  bool direct = false;
  std::string note;  // why it is not direct, for people
};

class Driver {
 public:
  virtual ~Driver() = default;

  // First call on the pump's thread; an error means that this driver cannot
  // run here.
  virtual Status begin() { return {}; }
  virtual std::string description() const = 0;

  virtual Result<OpenedFile> open(const std::string& path,
                                  const OpenOptions& options) = 0;
  virtual void close(int file) = 0;  // no operation of the file is in flight
  virtual Status remove(const std::string& path) = 0;
  // Both sizes are at least 1; on failure the file has the old one.
  virtual Status resize(int file, const std::string& path, std::uint64_t from,
                        std::uint64_t to) = 0;

  // Slots for registered memory; -errno when it cannot be had.
  virtual int register_memory(std::span<std::byte> memory);
  virtual void unregister_memory(int slot);

  // Takes an operation; at most Options::depth are in flight.
  virtual void start(RawOp* op) = 0;

  // Appends finished operations. When there are none, waits until one finishes,
  // somebody calls wake(), or the time is over.
  virtual void collect(std::vector<RawOp*>& finished,
                       std::chrono::nanoseconds timeout) = 0;

  // Ends a collect() that waits, now or the next one. Any thread.
  virtual void wake() = 0;
};

inline constexpr std::chrono::nanoseconds kForever =
    std::chrono::nanoseconds::max();

std::unique_ptr<Driver> make_uring_driver(const Options& options);
std::unique_ptr<Driver> make_threads_driver(const Options& options);
std::unique_ptr<Driver> make_memory_driver(std::shared_ptr<MemoryDisk> disk);
// The injector may be null.
std::unique_ptr<Driver> make_fault_driver(
    std::unique_ptr<Driver> inner, const std::vector<Fault>& faults,
    std::shared_ptr<FaultInjector> injector);

}  // namespace zinf::io
