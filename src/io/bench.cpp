#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <thread>
#include <vector>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "src/io/scratch.h"
#include "zinf/bytes.h"
#include "zinf/io_bench.h"

namespace zinf::io {
namespace {

// Requests in flight, each of half the depth: the queue is never empty, and no
// more memory is used than that takes (what stays in the cache is faster).
constexpr std::size_t kSlots = 3;

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) +
           static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class Stopwatch {
 public:
  Sample stop(std::uint64_t bytes) const {
    std::chrono::duration<double> wall = Clock::now() - begin_;
    return {wall.count(), cpu_seconds() - cpu_begin_, bytes};
  }

 private:
  using Clock = std::chrono::steady_clock;
  double cpu_begin_ = cpu_seconds();
  Clock::time_point begin_ = Clock::now();
};

// Anonymous memory on huge pages where the system gives them.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(align_up(bytes, kHugePage)) {
    void* data = mmap(nullptr, bytes_ + kHugePage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ZINF_CHECK(data != MAP_FAILED, "no memory for %zu bytes", bytes_);
    mapping_ = static_cast<std::byte*>(data);
    auto address = reinterpret_cast<std::uintptr_t>(mapping_);
    data_ = mapping_ + (align_up(address, kHugePage) - address);
    madvise(data_, bytes_, MADV_HUGEPAGE);
    std::memset(data_, 0, bytes_);
  }
  ~Memory() { munmap(mapping_, bytes_ + kHugePage); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::span<std::byte> span(std::size_t begin, std::size_t bytes) {
    return {data_ + begin, bytes};
  }
  std::span<std::byte> all() { return {data_, bytes_}; }

 private:
  std::size_t bytes_;
  std::byte* mapping_ = nullptr;
  std::byte* data_ = nullptr;
};

void fill_random(std::span<std::byte> memory, std::uint64_t seed) {
  std::uint64_t state = seed;
  for (std::size_t i = 0; i + 8 <= memory.size(); i += 8) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::uint64_t word = state ^ (state >> 29);
    std::memcpy(memory.data() + i, &word, 8);
  }
}

}  // namespace

// Request i moves bytes [i, i + 1) x request_bytes_ and uses slot i % kSlots; a
// slot's content to write never changes, so every byte of the file is known.
class Bench::Impl {
 public:
  Impl(std::optional<Scratch> scratch, std::string path, std::string name,
       std::uint64_t bytes)
      : scratch_(std::move(scratch)),
        path_(std::move(path)),
        name_(std::move(name)),
        bytes_(bytes) {}

  Status open(const Options& options) {
    file_.close();
    io_.reset();
    memory_.reset();
    ZINF_ASSIGN(io_, Io::create(options));
    ZINF_ASSIGN(file_, io_->open(path_, {}));
    request_bytes_ = static_cast<std::size_t>(std::max<std::uint64_t>(
        options.block_bytes,
        align_up(
            options.block_bytes * static_cast<std::size_t>(options.depth) / 2,
            options.block_bytes)));
    memory_ = std::make_unique<Memory>(2 * kSlots * request_bytes_);
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      fill_random(out(slot), slot + 1);
    }
    registration_ = io_->register_memory(memory_->all());
    return run(Direction::kWrite).status();
  }

  Result<Sample> run(Direction direction) {
    std::size_t count = requests();
    std::size_t half = count / 2;
    auto submit = [&](std::size_t i) {
      bool write = direction == Direction::kWrite ||
                   (direction == Direction::kMix && i % 2 == 0);
      // A mix writes the first half of the file and reads the second.
      std::size_t place = direction != Direction::kMix ? i
                          : write                      ? i / 2
                                                       : half + i / 2;
      place = std::min(place, count - 1);
      std::size_t bytes = request_size(place);
      auto offset = std::uint64_t{place} * request_bytes_;
      return write ? io_->write(file_, offset, out(place).first(bytes))
                   : io_->read(file_, offset, in(i).first(bytes));
    };
    std::deque<Request> pending;
    Stopwatch watch;
    for (std::size_t i = 0; i < count; ++i) {
      if (pending.size() == kSlots) {
        ZINF_TRY(pending.front().wait());
        pending.pop_front();
        report(i);
      }
      pending.push_back(submit(i));
    }
    for (Request& request : pending) ZINF_TRY(request.wait());
    report(count);
    return watch.stop(bytes_);
  }

  Result<Sample> run_plain(Direction direction, int threads) {
    int fd = ::open(path_.c_str(),
                    O_RDWR | O_CLOEXEC | (file_.direct() ? O_DIRECT : 0));
    if (fd < 0) return Status::system("open", name_, errno);
    std::size_t block = io_->options().block_bytes;
    std::size_t blocks = static_cast<std::size_t>((bytes_ + block - 1) / block);
    std::atomic<std::size_t> next = 0;
    std::atomic<int> error = 0;
    auto work = [&](std::size_t thread) {
      // Content that verify() expects: a block of the request that covers it.
      auto into =
          memory_->span(kSlots * request_bytes_ + thread * block, block);
      while (error == 0) {
        std::size_t i = next++;
        if (i >= blocks) return;
        std::uint64_t offset = std::uint64_t{i} * block;
        auto bytes = static_cast<std::size_t>(
            std::min<std::uint64_t>(block, bytes_ - offset));
        auto place = static_cast<std::size_t>(offset / request_bytes_);
        auto from = out(place).subspan(offset % request_bytes_, bytes);
        auto at = static_cast<off_t>(offset);
        ssize_t moved = direction == Direction::kRead
                            ? pread(fd, into.data(), bytes, at)
                            : pwrite(fd, from.data(), bytes, at);
        if (moved != static_cast<ssize_t>(bytes)) {
          error = moved < 0 ? errno : EIO;
        }
      }
    };
    // The free half of the memory has room for so many blocks.
    auto room = static_cast<int>(kSlots * request_bytes_ / block);
    int count = std::min(threads, room);
    std::vector<std::thread> workers;
    workers.reserve(static_cast<std::size_t>(count));
    Stopwatch watch;
    for (int i = 0; i < count; ++i) {
      workers.emplace_back(work, static_cast<std::size_t>(i));
    }
    for (std::thread& worker : workers) worker.join();
    Sample sample = watch.stop(bytes_);
    ::close(fd);
    if (error != 0) return Status::system("measure plainly", name_, error);
    return sample;
  }

  Status verify() {
    for (std::size_t i = 0; i < requests(); ++i) {
      std::size_t bytes = request_size(i);
      std::uint64_t offset = std::uint64_t{i} * request_bytes_;
      auto got = in(i).first(bytes);
      ZINF_TRY(io_->read(file_, offset, got).wait());
      auto wanted = out(i).first(bytes);
      auto [bad, expected] =
          std::mismatch(got.begin(), got.end(), wanted.begin());
      if (bad != got.end()) {
        std::uint64_t where =
            offset + static_cast<std::uint64_t>(bad - got.begin());
        return Status::error(
            Code::kCorrupt,
            strf("verify %s: byte %llu is not what was written", name_.c_str(),
                 static_cast<unsigned long long>(where)));
      }
      report(i + 1);
    }
    return {};
  }

  const Io& io() const { return *io_; }
  bool direct() const { return file_.direct(); }
  void set_progress(Progress progress) { progress_ = std::move(progress); }

 private:
  std::size_t requests() const {
    return static_cast<std::size_t>((bytes_ + request_bytes_ - 1) /
                                    request_bytes_);
  }
  std::size_t request_size(std::size_t i) const {
    std::uint64_t left = bytes_ - std::uint64_t{i} * request_bytes_;
    return static_cast<std::size_t>(
        std::min<std::uint64_t>(request_bytes_, left));
  }
  std::span<std::byte> out(std::size_t i) {
    return memory_->span(i % kSlots * request_bytes_, request_bytes_);
  }
  std::span<std::byte> in(std::size_t i) {
    return memory_->span((kSlots + i % kSlots) * request_bytes_,
                         request_bytes_);
  }
  void report(std::size_t requests_done) {
    if (!progress_) return;
    progress_(std::min(bytes_, std::uint64_t{requests_done} * request_bytes_),
              bytes_);
  }

  std::optional<Scratch> scratch_;
  const std::string path_;
  const std::string name_;  // for people
  const std::uint64_t bytes_;
  Progress progress_;

  // In the order of their making; the memory goes after what refers to it.
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Io> io_;
  Registration registration_;
  File file_;
  std::size_t request_bytes_ = 0;
};

Bench::Bench(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Bench::~Bench() = default;
Bench::Bench(Bench&& other) noexcept = default;
Bench& Bench::operator=(Bench&& other) noexcept = default;

Result<Bench> Bench::in_directory(const std::string& path,
                                  std::uint64_t bytes) {
  if (bytes < File::kAlignment) {
    return Status::error(Code::kInvalid, "the size must be at least 4 KiB");
  }
  bytes = align_down(bytes, std::uint64_t{File::kAlignment});
  ZINF_ASSIGN(Scratch scratch, Scratch::create(path, bytes));
  std::string scratch_path = scratch.path();
  return Bench(
      std::make_unique<Impl>(std::move(scratch), scratch_path, path, bytes));
}

Result<Bench> Bench::on_file(const std::string& path) {
  struct stat info{};
  if (stat(path.c_str(), &info) != 0) {
    return Status::system("open", path, errno);
  }
  auto bytes = align_down(static_cast<std::uint64_t>(info.st_size),
                          std::uint64_t{File::kAlignment});
  if (!S_ISREG(info.st_mode) || bytes == 0) {
    return Status::error(Code::kInvalid,
                         path + " is not a regular file of 4 KiB or more");
  }
  return Bench(std::make_unique<Impl>(std::nullopt, path, path, bytes));
}

void Bench::set_progress(Progress progress) {
  impl_->set_progress(std::move(progress));
}
Status Bench::open(const Options& options) { return impl_->open(options); }
const Io& Bench::io() const { return impl_->io(); }
bool Bench::direct() const { return impl_->direct(); }
Result<Sample> Bench::run(Direction direction) { return impl_->run(direction); }
Result<Sample> Bench::run_plain(Direction direction, int threads) {
  return impl_->run_plain(direction, threads);
}
Status Bench::verify() { return impl_->verify(); }

}  // namespace zinf::io
