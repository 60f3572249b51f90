// io_uring: one ring, one issuer (the pump's thread), registered files and
// memory where the system allows them.
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <bitset>
#include <cerrno>
#include <utility>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/start_thread.h"
#include "src/base/strf.h"
#include "src/io/posix_driver.h"
#include "zinf/log.h"

namespace zinf::io {
namespace {

constexpr int kMaxSlots = 256;  // registered pieces of memory
constexpr int kMaxFiles = 64;   // registered files, two descriptors each

class UringDriver final : public PosixDriver {
 public:
  explicit UringDriver(const Options& options)
      : PosixDriver(options.caching),
        entries_(static_cast<unsigned>(options.depth) + 1) {}

  ~UringDriver() override {
    if (ring_ready_) io_uring_queue_exit(&ring_);
    if (wake_fd_ >= 0) ::close(wake_fd_);
  }

  Status begin() override {
    ZINF_TRY(set_up_ring());
    ring_ready_ = true;
    ZINF_TRY(try_ring());
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return Status::system("create", "eventfd", errno);
    slots_ready_ = io_uring_register_buffers_sparse(&ring_, kMaxSlots) == 0;
    files_ready_ = io_uring_register_files_sparse(&ring_, 2 * kMaxFiles) == 0;
    listen_for_wake();
    return {};
  }

  std::string description() const override {
    return strf("io_uring, %s", mode_);
  }

  Result<OpenedFile> open(const std::string& path,
                          const OpenOptions& options) override {
    ZINF_ASSIGN(OpenedFile opened, PosixDriver::open(path, options));
    if (registered(opened.file)) {
      std::array<int, 2> fds = {descriptors(opened.file).buffered,
                                descriptors(opened.file).direct};
      int done = io_uring_register_files_update(
          &ring_, static_cast<unsigned>(2 * opened.file), fds.data(), 2);
      // The table has room, so this does not fail on a healthy ring.
      if (done != 2) files_ready_ = false;
    }
    return opened;
  }

  void close(int file) override {
    if (registered(file)) {
      std::array<int, 2> none = {-1, -1};
      io_uring_register_files_update(&ring_, static_cast<unsigned>(2 * file),
                                     none.data(), 2);
    }
    PosixDriver::close(file);
  }

  int register_memory(std::span<std::byte> memory) override {
    if (!slots_ready_) return -EOPNOTSUPP;
    std::size_t slot = 0;
    while (slot < kMaxSlots && used_slots_[slot]) ++slot;
    if (slot == kMaxSlots) return -ENOBUFS;
    iovec piece = {memory.data(), memory.size()};
    __u64 tag = 0;
    int done = io_uring_register_buffers_update_tag(
        &ring_, static_cast<unsigned>(slot), &piece, &tag, 1);
    if (done < 0) return done;
    used_slots_.set(slot);
    return static_cast<int>(slot);
  }

  void unregister_memory(int slot) override {
    iovec nothing = {nullptr, 0};
    __u64 tag = 0;
    io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(slot),
                                         &nothing, &tag, 1);
    used_slots_.reset(static_cast<std::size_t>(slot));
  }

  void start(RawOp* op) override {
    io_uring_sqe* sqe = next_entry();
    bool fixed_file = registered(op->file);
    int fd = fixed_file ? 2 * op->file + (op->direct ? 1 : 0) : descriptor(*op);
    prepare(sqe, *op, fd);
    if (fixed_file) sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, op);
  }

  void collect(std::vector<RawOp*>& finished,
               std::chrono::nanoseconds timeout) override {
    // What is there already needs no wait, only the submission of new entries.
    unsigned wanted = io_uring_cq_ready(&ring_) == 0 ? 1 : 0;
    int result = 0;
    if (timeout == kForever || wanted == 0) {
      result = io_uring_submit_and_wait(&ring_, wanted);
    } else {
      __kernel_timespec limit = {timeout.count() / 1'000'000'000,
                                 timeout.count() % 1'000'000'000};
      io_uring_cqe* first = nullptr;
      result = io_uring_submit_and_wait_timeout(&ring_, &first, wanted, &limit,
                                                nullptr);
    }
    // EBUSY and EAGAIN: the kernel wants completions taken first.
    bool passing = result >= 0 || result == -EINTR || result == -EAGAIN ||
                   result == -EBUSY || result == -ETIME;
    ZINF_CHECK(passing, "io_uring_enter failed with errno %d", -result);
    take_completions(finished);
  }

  void wake() override {
    std::uint64_t one = 1;
    ssize_t written = write(wake_fd_, &one, sizeof one);
    ZINF_CHECK(written == sizeof one, "eventfd refused a write");
  }

 private:
  Status set_up_ring() {
    struct Mode {
      unsigned flags;
      const char* name;
    };
    // Newer kernels run completions only when the one issuer asks for them: no
    // interruptions of the compute threads.
    constexpr std::array<Mode, 3> kModes = {
        {{IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
          "single issuer, deferred completions"},
         {IORING_SETUP_COOP_TASKRUN, "cooperative completions"},
         {0, "plain"}}};
    int result = 0;
    for (const Mode& mode : kModes) {
      result = io_uring_queue_init(entries_, &ring_, mode.flags);
      if (result == 0) {
        mode_ = mode.name;
        return {};
      }
      if (result != -EINVAL) break;  // the flags are not the trouble
    }
    return Status::system("set up", "io_uring", -result);
  }

  // Some systems let a ring be made and then forbid its use.
  Status try_ring() {
    io_uring_prep_nop(next_entry());
    int result = io_uring_submit_and_wait(&ring_, 1);
    if (result < 0) return Status::system("use", "io_uring", -result);
    io_uring_cqe* cqe = nullptr;
    result = io_uring_peek_cqe(&ring_, &cqe);
    if (result < 0) return Status::system("use", "io_uring", -result);
    io_uring_cqe_seen(&ring_, cqe);
    return {};
  }

  bool registered(int file) const { return files_ready_ && file < kMaxFiles; }

  io_uring_sqe* next_entry() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {
      io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
    }
    ZINF_CHECK(sqe != nullptr, "no entry in a ring of %u", entries_);
    return sqe;
  }

  static void prepare(io_uring_sqe* sqe, const RawOp& op, int fd) {
    auto bytes = static_cast<unsigned>(op.bytes);
    auto pieces = static_cast<unsigned>(op.pieces.size());
    switch (op.kind) {
      case Operation::kRead:
        if (pieces > 0) {
          io_uring_prep_readv(sqe, fd, op.pieces.data(), pieces, op.offset);
        } else if (op.slot >= 0) {
          io_uring_prep_read_fixed(sqe, fd, op.data, bytes, op.offset, op.slot);
        } else {
          io_uring_prep_read(sqe, fd, op.data, bytes, op.offset);
        }
        break;
      case Operation::kWrite:
        if (pieces > 0) {
          io_uring_prep_writev(sqe, fd, op.pieces.data(), pieces, op.offset);
        } else if (op.slot >= 0) {
          io_uring_prep_write_fixed(sqe, fd, op.data, bytes, op.offset,
                                    op.slot);
        } else {
          io_uring_prep_write(sqe, fd, op.data, bytes, op.offset);
        }
        break;
      case Operation::kSync:
        io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
        break;
      case Operation::kResize:
      case Operation::kCreate:
        break;  // never in flight
    }
  }

  void listen_for_wake() {
    io_uring_sqe* sqe = next_entry();
    io_uring_prep_read(sqe, wake_fd_, &wake_count_, sizeof wake_count_, 0);
    io_uring_sqe_set_data(sqe, nullptr);
  }

  void take_completions(std::vector<RawOp*>& finished) {
    bool woken = false;
    unsigned head = 0;
    unsigned count = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++count;
      auto* op = static_cast<RawOp*>(io_uring_cqe_get_data(cqe));
      if (op == nullptr) {
        woken = true;
      } else if (cqe->user_data != LIBURING_UDATA_TIMEOUT) {
        op->result = cqe->res == -ECANCELED ? without_worker(*op) : cqe->res;
        finished.push_back(op);
      }
    }
    io_uring_cq_advance(&ring_, count);
    if (woken) listen_for_wake();
  }

  // The ring gives a sync, and what else would wait, to a thread of the kernel,
  // and cancels it when the system allows no such thread.
  std::int64_t without_worker(const RawOp& op) {
    if (!std::exchange(told_, true)) {
      log(LogLevel::kWarning,
          "io: the kernel cannot start a thread that io_uring needs, so that "
          "some transfers are slower: %s",
          thread_limit().c_str());
    }
    return carry_out(op, descriptor(op));
  }

  const unsigned entries_;
  io_uring ring_{};
  bool ring_ready_ = false;
  bool slots_ready_ = false;
  bool files_ready_ = false;
  const char* mode_ = "";
  std::bitset<kMaxSlots> used_slots_;
  int wake_fd_ = -1;
  std::uint64_t wake_count_ = 0;
  bool told_ = false;  // that threads are short
};

}  // namespace

std::unique_ptr<Driver> make_uring_driver(const Options& options) {
  return std::make_unique<UringDriver>(options);
}

}  // namespace zinf::io
