// Files in memory: the conformance suite's third back end, and fast tests.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "src/io/completions.h"

namespace zinf::io {
namespace {

class MemoryDriver final : public Driver {
 public:
  std::string description() const override { return "files in memory"; }

  Result<OpenedFile> open(const std::string& path,
                          const OpenOptions& options) override {
    auto found = contents_.find(path);
    if (options.mode == Open::kExisting && found == contents_.end()) {
      return Status::system("open", path, ENOENT);
    }
    if (options.mode == Open::kCreate && found != contents_.end()) {
      return Status::system("create", path, EEXIST);
    }
    if (options.mode != Open::kExisting) {
      contents_[path] = std::make_shared<Contents>(options.bytes);
    }
    open_.push_back(contents_[path]);
    return OpenedFile{.file = static_cast<int>(open_.size()) - 1,
                      .bytes = open_.back()->size(),
                      .direct = false,
                      .note = "it lives in memory"};
  }

  void close(int file) override { open_[index(file)].reset(); }

  Status remove(const std::string& path) override {
    if (contents_.erase(path) == 1) return {};
    return Status::system("remove", path, ENOENT);
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
  using Contents = std::vector<std::byte>;

  static std::size_t index(int file) { return static_cast<std::size_t>(file); }

  std::int64_t carry_out(const RawOp& op) {
    Contents& contents = *open_[index(op.file)];
    std::size_t left = contents.size() - std::min(op.offset, contents.size());
    std::size_t bytes = std::min(op.bytes, left);
    std::byte* place = contents.data() + op.offset;
    if (op.kind == Operation::kRead) std::memcpy(op.data, place, bytes);
    if (op.kind == Operation::kWrite) std::memcpy(place, op.data, bytes);
    return op.kind == Operation::kSync ? 0 : static_cast<std::int64_t>(bytes);
  }

  std::map<std::string, std::shared_ptr<Contents>> contents_;
  std::vector<std::shared_ptr<Contents>> open_;
  Completions completions_;
};

}  // namespace

std::unique_ptr<Driver> make_memory_driver() {
  return std::make_unique<MemoryDriver>();
}

}  // namespace zinf::io
