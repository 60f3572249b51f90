// Files in memory: the conformance suite's third back end, and fast tests.
#include "src/io/completions.h"
#include "src/io/memory_disk.h"

namespace zinf::io {

class MemoryDriver final : public Driver {
 public:
  explicit MemoryDriver(std::shared_ptr<MemoryDisk> disk)
      : disk_(disk != nullptr ? std::move(disk)
                              : std::make_shared<MemoryDisk>()) {}

  std::string description() const override { return "files in memory"; }

  Result<OpenedFile> open(const std::string& path,
                          const OpenOptions& options) override {
    ZINF_ASSIGN(auto file, disk_->impl_->open(path, options));
    open_.push_back(std::move(file));
    return OpenedFile{.file = static_cast<int>(open_.size()) - 1,
                      .bytes = disk_->impl_->bytes(*open_.back()),
                      .direct = false,
                      .note = "it lives in memory"};
  }

  void close(int file) override { open_[index(file)].reset(); }

  Status remove(const std::string& path) override {
    return disk_->impl_->remove(path);
  }

  Status resize(int file, const std::string& path, std::uint64_t /*from*/,
                std::uint64_t to) override {
    return disk_->impl_->resize(*open_[index(file)], path, to);
  }

  void start(RawOp* op) override {
    op->result = carry_out(*op);
    completions_.add(op);
  }

  void collect(std::vector<RawOp*>& finished,
               std::chrono::nanoseconds timeout) override {
    completions_.collect(finished, timeout);
  }

  void wake() override { completions_.wake(); }

 private:
  static std::size_t index(int file) { return static_cast<std::size_t>(file); }

  std::int64_t carry_out(const RawOp& op) {
    MemoryDisk::Impl& disk = *disk_->impl_;
    MemoryDisk::Impl::File& file = *open_[index(op.file)];
    switch (op.kind) {
      case Operation::kRead:
        return disk.read(file, op.offset, {op.data, op.bytes});
      case Operation::kWrite:
        return disk.write(file, op.offset, {op.data, op.bytes});
      case Operation::kSync:
        return disk.sync(file);
      case Operation::kResize:
      case Operation::kCreate:
        break;  // never in flight
    }
    return -1;
  }

  std::shared_ptr<MemoryDisk> disk_;
  std::vector<std::shared_ptr<MemoryDisk::Impl::File>> open_;
  Completions completions_;
};

std::unique_ptr<Driver> make_memory_driver(std::shared_ptr<MemoryDisk> disk) {
  return std::make_unique<MemoryDriver>(std::move(disk));
}

}  // namespace zinf::io
