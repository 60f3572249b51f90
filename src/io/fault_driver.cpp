// A wrapper that makes another driver fail the way disks do.
#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <optional>
#include <random>
#include <span>
#include <unordered_map>

#include "src/base/strf.h"
#include "src/io/driver.h"
#include "zinf/fault_injector.h"

namespace zinf::io {
namespace {

using Clock = std::chrono::steady_clock;

class FaultDriver final : public Driver {
 public:
  FaultDriver(std::unique_ptr<Driver> inner, const std::vector<Fault>& faults,
              std::shared_ptr<FaultInjector> injector)
      : inner_(std::move(inner)), injector_(std::move(injector)) {
    for (const Fault& fault : faults) {
      rules_.push_back({fault, std::mt19937_64(fault.seed)});
    }
  }

  Status begin() override { return inner_->begin(); }
  std::string description() const override {
    return strf("%s, with %zu injected faults", inner_->description().c_str(),
                rules_.size());
  }
  Result<OpenedFile> open(const std::string& path,
                          const OpenOptions& options) override {
    if (creates(options.mode)) {
      ZINF_TRY(fail_whole_file(Operation::kCreate,
                               options.name.empty() ? path : options.name));
    }
    return inner_->open(path, options);
  }
  void close(int file) override { inner_->close(file); }
  Status remove(const std::string& path) override {
    return inner_->remove(path);
  }
  Status resize(int file, const std::string& path, std::uint64_t from,
                std::uint64_t to) override {
    ZINF_TRY(fail_whole_file(Operation::kResize, path));
    return inner_->resize(file, path, from, to);
  }
  int register_memory(std::span<std::byte> memory) override {
    return inner_->register_memory(memory);
  }
  void unregister_memory(int slot) override { inner_->unregister_memory(slot); }
  void wake() override { inner_->wake(); }

  void start(RawOp* op) override {
    limit_rate(op);
    std::optional<Fault> fault = next_fault(op->kind);
    if (!fault) return inner_->start(op);
    if (fault->kind == Fault::Kind::kError) {
      due_.erase(op);
      op->result = -fault->errnum;
      ready_.push_back(op);
      return;
    }
    if (fault->kind == Fault::Kind::kLost) {
      op->result = static_cast<std::int64_t>(op->bytes);
      ready_.push_back(op);
      return;
    }
    altered_[op] = {*fault, op->bytes, op->direct, op->pieces};
    bool whole =
        fault->kind == Fault::Kind::kDelay || fault->kind == Fault::Kind::kFlip;
    bool halved = !whole && op->bytes > 1;
    if (halved && !op->pieces.empty()) {
      op->bytes = op->pieces.front().iov_len;
      op->pieces.clear();
    } else if (halved) {
      op->bytes /= 2;
      op->direct = false;  // half of a block may not be aligned
    }
    inner_->start(op);
  }

  void collect(std::vector<RawOp*>& finished,
               std::chrono::nanoseconds timeout) override {
    if (!ready_.empty()) timeout = std::chrono::nanoseconds(0);
    for (const Held& held : held_) {
      std::chrono::nanoseconds left = held.due - Clock::now();
      timeout = std::clamp(left, std::chrono::nanoseconds(0), timeout);
    }
    std::vector<RawOp*> inner_finished;
    inner_->collect(inner_finished, timeout);
    for (RawOp* op : inner_finished) settle(op);
    std::erase_if(held_, [&](const Held& held) {
      if (held.due > Clock::now()) return false;
      ready_.push_back(held.op);
      return true;
    });
    finished.insert(finished.end(), ready_.begin(), ready_.end());
    ready_.clear();
  }

 private:
  struct Rule {
    Fault fault;
    std::mt19937_64 random;
    Clock::time_point free_at = {};  // of a rate: when its queue is empty
  };
  struct Altered {
    Fault fault;
    std::size_t bytes;
    bool direct;
    std::vector<iovec> pieces;
  };
  struct Held {
    RawOp* op;
    Clock::time_point due;
  };

  // These fail as a whole or not at all.
  Status fail_whole_file(Operation operation, const std::string& path) {
    std::optional<Fault> fault = next_fault(operation);
    if (!fault || fault->kind != Fault::Kind::kError) return {};
    return Status::system(operation_name(operation), path, fault->errnum);
  }

  // Counts the operation and says which fault, if any, it meets.
  std::optional<Fault> next_fault(Operation kind) {
    std::optional<Fault> fault = next_of_rules(kind);
    if (!fault && injector_ != nullptr) fault = injector_->next(kind);
    if (fault && fault->kind == Fault::Kind::kKill) raise(SIGKILL);
    return fault;
  }

  std::optional<Fault> next_of_rules(Operation kind) {
    std::uint64_t count = ++counts_[static_cast<std::size_t>(kind)];
    for (Rule& rule : rules_) {
      const Fault& fault = rule.fault;
      if (fault.on != kind || fault.kind == Fault::Kind::kRate) continue;
      bool fires =
          fault.nth != 0
              ? count == fault.nth || (fault.and_after && count > fault.nth)
              : std::bernoulli_distribution(fault.probability)(rule.random);
      if (fires) return fault;
    }
    return std::nullopt;
  }

  // A limited disk serves one operation after the other.
  void limit_rate(RawOp* op) {
    for (Rule& rule : rules_) {
      const Fault& fault = rule.fault;
      if (fault.kind != Fault::Kind::kRate || fault.on != op->kind) continue;
      std::chrono::duration<double> takes(static_cast<double>(op->bytes) /
                                          fault.bytes_per_second);
      rule.free_at = std::max(rule.free_at, Clock::now()) +
                     std::chrono::duration_cast<Clock::duration>(takes);
      due_[op] = rule.free_at;
    }
  }

  void finish(RawOp* op, Clock::time_point due) {
    if (auto limited = due_.find(op); limited != due_.end()) {
      due = std::max(due, limited->second);
      due_.erase(limited);
    }
    if (due > Clock::now()) {
      held_.push_back({op, due});
    } else {
      ready_.push_back(op);
    }
  }

  static void flip(RawOp* op, std::uint64_t seed) {
    if (op->kind != Operation::kRead || op->result <= 0) return;
    std::span<std::byte> read(op->data, op->bytes);
    if (!op->pieces.empty()) {
      const iovec& first = op->pieces.front();
      read = {static_cast<std::byte*>(first.iov_base), first.iov_len};
    }
    std::size_t bytes =
        std::min(read.size(), static_cast<std::size_t>(op->result));
    read[seed % bytes] ^= std::byte{1};
  }

  // Gives an operation back its own form, with the result that the fault wants.
  void settle(RawOp* op) {
    auto found = altered_.find(op);
    if (found == altered_.end()) return finish(op, {});
    Altered altered = std::move(found->second);
    altered_.erase(found);
    op->bytes = altered.bytes;
    op->direct = altered.direct;
    op->pieces = std::move(altered.pieces);
    if (altered.fault.kind == Fault::Kind::kTorn) {
      op->result = -altered.fault.errnum;
    }
    if (altered.fault.kind == Fault::Kind::kFlip) flip(op, altered.fault.seed);
    bool delayed = altered.fault.kind == Fault::Kind::kDelay;
    finish(op,
           delayed ? Clock::now() + altered.fault.delay : Clock::time_point{});
  }

  std::unique_ptr<Driver> inner_;
  const std::shared_ptr<FaultInjector> injector_;
  std::vector<Rule> rules_;
  std::array<std::uint64_t, kNumOperations> counts_{};
  std::unordered_map<RawOp*, Altered> altered_;
  std::unordered_map<RawOp*, Clock::time_point> due_;  // by a rate
  std::vector<Held> held_;
  std::vector<RawOp*> ready_;
};

}  // namespace

std::unique_ptr<Driver> make_fault_driver(
    std::unique_ptr<Driver> inner, const std::vector<Fault>& faults,
    std::shared_ptr<FaultInjector> injector) {
  return std::make_unique<FaultDriver>(std::move(inner), faults,
                                       std::move(injector));
}

}  // namespace zinf::io
