#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <latch>
#include <optional>
#include <thread>
#include <vector>

#include "src/base/align.h"
#include "src/base/mapping.h"
#include "src/base/start_thread.h"
#include "src/base/strf.h"
#include "src/io/bench_pages.h"
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

}  // namespace

// The file is cut into places of request_bytes_; a place is written from and
// read into the slot place % kSlots. Every page says where it belongs and which
// pass wrote it (bench_pages.h), so a transfer that went elsewhere or nowhere
// shows.
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
    memory_ = {};
    ZINF_ASSIGN(io_, Io::create(options));
    ZINF_ASSIGN(file_, io_->open(path_, {.name = name_}));
    std::uint64_t half_depth = std::uint64_t{options.block_bytes} *
                               static_cast<unsigned>(options.depth + 1) / 2;
    request_bytes_ = static_cast<std::size_t>(
        std::min(align_up(half_depth, std::uint64_t{kPage}), bytes_));
    ZINF_ASSIGN(memory_, Mapping::create(2 * kSlots * request_bytes_));
    fill_pages(memory_.span().first(kSlots * request_bytes_));
    registration_ = io_->register_memory(memory_.span());
    passes_.assign(num_places(), 0);
    return run(Direction::kWrite).status();
  }

  Result<Sample> run(Direction direction) {
    std::vector<Step> steps = steps_of(direction);
    if (steps.empty()) {
      return Status::error(
          Code::kInvalid,
          strf("%s: too small to read one part while another is written; %s "
               "would do",
               name_.c_str(), format_bytes(2 * request_bytes_).c_str()));
    }
    ++pass_;
    spoil_pages(memory_.span().subspan(kSlots * request_bytes_));
    std::deque<Request> pending;
    std::uint64_t moved = 0;
    Stopwatch watch;
    for (const Step& step : steps) {
      if (pending.size() == kSlots) {
        ZINF_TRY(pending.front().wait());
        pending.pop_front();
        report(moved);
      }
      pending.push_back(submit(step));
      moved += place_bytes(step.place);
    }
    for (Request& request : pending) ZINF_TRY(request.wait());
    Sample sample = watch.stop(moved);
    report(moved);
    // What was read last is still there.
    std::size_t last = steps.size() - std::min(steps.size(), kSlots);
    for (std::size_t i = last; i < steps.size(); ++i) {
      if (!steps[i].write) ZINF_TRY(check(steps[i].place));
    }
    return sample;
  }

  Result<Sample> run_plain(Direction direction, int threads) {
    int fd = ::open(path_.c_str(),
                    O_RDWR | O_CLOEXEC | (file_.direct() ? O_DIRECT : 0));
    if (fd < 0) return Status::system("open", name_, errno);
    ++pass_;
    PlainLoop loop(*this, fd, direction);
    Result<Sample> sample = loop.run(threads);
    ::close(fd);
    if (direction == Direction::kWrite) passes_.assign(num_places(), pass_);
    return sample;
  }

  Status verify() {
    std::uint64_t done = 0;
    for (std::size_t place = 0; place < num_places(); ++place) {
      spoil_pages(in(place));
      ZINF_TRY(io_->read(file_, offset_of(place), in(place)).wait());
      ZINF_TRY(check(place));
      done += place_bytes(place);
      report(done);
    }
    return {};
  }

  const Io& io() const { return *io_; }
  bool direct() const { return file_.direct(); }
  void set_progress(Progress progress) { progress_ = std::move(progress); }

 private:
  struct Step {
    std::size_t place;
    bool write;
  };

  // pread and pwrite of whole blocks by threads that take the next one.
  class PlainLoop {
   public:
    PlainLoop(Impl& impl, int fd, Direction direction)
        : impl_(impl), fd_(fd), write_(direction == Direction::kWrite) {}

    Result<Sample> run(int threads) {
      std::span<std::byte> memory = impl_.memory_.span();
      auto room = static_cast<int>(memory.size() / block());
      int count = std::clamp(threads, 1, std::max(room, 1));
      fill_pages(memory);
      std::vector<std::thread> workers(static_cast<std::size_t>(count));
      Status status;
      std::latch ready(count);
      for (std::size_t i = 0; i < workers.size() && status.ok(); ++i) {
        status = start_thread(workers[i], [this, i, memory, &ready] {
          ready.count_down();
          begin_.wait(false);
          work(memory.subspan(i * block(), block()));
        });
        if (!status.ok()) error_ = status.errnum();
      }
      if (status.ok()) ready.wait();
      Stopwatch watch;
      begin_ = true;
      begin_.notify_all();
      for (std::thread& worker : workers) {
        if (worker.joinable()) worker.join();
      }
      Sample sample = watch.stop(impl_.bytes_);
      // The slots to write from are whole again for the next run.
      fill_pages(memory.first(kSlots * impl_.request_bytes_));
      if (error_ != 0) {
        return Status::system("measure plainly", impl_.name_, error_);
      }
      return sample;
    }

   private:
    std::size_t block() const {
      return std::min(impl_.io_->options().block_bytes,
                      2 * kSlots * impl_.request_bytes_);
    }

    void work(std::span<std::byte> memory) {
      while (error_ == 0) {
        std::uint64_t offset = next_.fetch_add(block());
        if (offset >= impl_.bytes_) return;
        auto bytes = static_cast<std::size_t>(
            std::min<std::uint64_t>(block(), impl_.bytes_ - offset));
        auto at = static_cast<off_t>(offset);
        if (write_) stamp_pages(memory.first(bytes), offset, impl_.pass_);
        ssize_t moved = write_ ? pwrite(fd_, memory.data(), bytes, at)
                               : pread(fd_, memory.data(), bytes, at);
        if (moved != static_cast<ssize_t>(bytes)) {
          error_ = moved < 0 ? errno : EIO;
        }
      }
    }

    Impl& impl_;
    const int fd_;
    const bool write_;
    std::atomic<std::uint64_t> next_ = 0;
    std::atomic<int> error_ = 0;
    std::atomic<bool> begin_ = false;
  };

  // A mix writes the first half of the file while it reads the second.
  std::vector<Step> steps_of(Direction direction) const {
    std::vector<Step> steps;
    if (direction != Direction::kMix) {
      for (std::size_t place = 0; place < num_places(); ++place) {
        steps.push_back({place, direction == Direction::kWrite});
      }
      return steps;
    }
    std::size_t half = num_places() / 2;
    for (std::size_t place = 0; place < half; ++place) {
      steps.push_back({place, true});
      steps.push_back({half + place, false});
    }
    return steps;
  }

  // The slot is free: what used it last came kSlots steps or more before.
  Request submit(const Step& step) {
    std::uint64_t offset = offset_of(step.place);
    if (!step.write) return io_->read(file_, offset, in(step.place));
    stamp_pages(out(step.place), offset, pass_);
    passes_[step.place] = pass_;
    return io_->write(file_, offset, out(step.place));
  }

  Status check(std::size_t place) {
    std::uint64_t offset = offset_of(place);
    std::optional<std::size_t> wrong =
        first_wrong_byte(in(place), offset, passes_[place]);
    if (!wrong) return {};
    return Status::error(
        Code::kCorrupt,
        strf("verify %s: byte %llu is not what was written", name_.c_str(),
             static_cast<unsigned long long>(offset + *wrong)));
  }

  std::size_t num_places() const {
    return static_cast<std::size_t>((bytes_ + request_bytes_ - 1) /
                                    request_bytes_);
  }
  std::uint64_t offset_of(std::size_t place) const {
    return std::uint64_t{place} * request_bytes_;
  }
  std::size_t place_bytes(std::size_t place) const {
    return static_cast<std::size_t>(
        std::min<std::uint64_t>(request_bytes_, bytes_ - offset_of(place)));
  }
  std::span<std::byte> slot(std::size_t number, std::size_t place) {
    return memory_.span().subspan(number * request_bytes_, place_bytes(place));
  }
  std::span<std::byte> out(std::size_t place) {
    return slot(place % kSlots, place);
  }
  std::span<std::byte> in(std::size_t place) {
    return slot(kSlots + place % kSlots, place);
  }
  void report(std::uint64_t done) {
    if (progress_) progress_(done, bytes_);
  }

  std::optional<Scratch> scratch_;
  const std::string path_;
  const std::string name_;  // for people
  const std::uint64_t bytes_;
  Progress progress_;

  // In the order of their making; the memory goes after what refers to it.
  Mapping memory_;
  std::unique_ptr<Io> io_;
  Registration registration_;
  File file_;
  std::size_t request_bytes_ = 0;

  std::uint64_t pass_ = 0;
  std::vector<std::uint64_t> passes_;  // that wrote each place last
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
