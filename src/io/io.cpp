#include "zinf/io.h"

#include <array>
#include <cerrno>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "src/base/suggest.h"
#include "src/io/pump.h"
#include "zinf/log.h"

namespace zinf::io {

namespace {

const std::array<std::string, 4> kBackendNames = {"auto", "io_uring", "threads",
                                                  "memory"};

unsigned long long number(std::uint64_t value) { return value; }

// Why the transfer cannot be, or ok.
Status check_transfer(Operation operation, const detail::FileState& file,
                      std::uint64_t offset, std::size_t bytes) {
  auto refuse = [&](const std::string& why) {
    return Status::error(
        Code::kInvalid,
        strf("%s %s at offset %llu: %s", operation_name(operation).data(),
             file.path.c_str(), number(offset), why.c_str()));
  };
  if (operation == Operation::kSync) return {};
  if (bytes == 0) return refuse("zero bytes");
  std::uint64_t size = file.bytes;
  if (offset > size || bytes > size - offset) {
    return refuse(
        strf("%zu bytes reach beyond the file's %llu", bytes, number(size)));
  }
  return {};
}

}  // namespace

std::string_view backend_name(Backend backend) {
  return kBackendNames[static_cast<std::size_t>(backend)];
}

Result<Backend> parse_backend(std::string_view name) {
  for (std::size_t i = 0; i < kBackendNames.size(); ++i) {
    if (name == kBackendNames[i]) return static_cast<Backend>(i);
  }
  std::string near = nearest_name(name, kBackendNames);
  return Status::error(
      Code::kInvalid,
      strf("unknown back end \"%.*s\"%s: it is one of auto, io_uring, "
           "threads",
           len(name), name.data(),
           near.empty() ? ""
                        : strf(" (did you mean %s?)", near.c_str()).c_str()));
}

std::string_view operation_name(Operation operation) {
  switch (operation) {
    case Operation::kRead:
      return "read";
    case Operation::kWrite:
      return "write";
    case Operation::kSync:
      return "sync";
    case Operation::kResize:
      return "resize";
    case Operation::kCreate:
      return "create";
  }
  return "?";
}

Status Options::validate() const {
  std::string problems;
  auto complain = [&](const std::string& problem) {
    if (!problems.empty()) problems += "; ";
    problems += problem;
  };
  if (block_bytes < kPage || block_bytes > kGiB ||
      !is_aligned(block_bytes, kPage)) {
    complain(
        strf("block is %zu bytes, it must be a multiple of 4096 from 4 KiB "
             "to 1 GiB",
             block_bytes));
  }
  if (depth < 1 || depth > 4096) {
    complain(strf("depth is %d, it must be from 1 to 4096", depth));
  }
  if (threads < 1 || threads > 256) {
    complain(strf("threads is %d, it must be from 1 to 256", threads));
  }
  for (const Fault& fault : faults) {
    if (fault.probability < 0 || fault.probability > 1) {
      complain(strf("a fault's probability is %g", fault.probability));
    }
    if (fault.kind == Fault::Kind::kRate && !(fault.bytes_per_second > 0)) {
      complain(strf("a fault's rate is %g", fault.bytes_per_second));
    }
  }
  if (problems.empty()) return {};
  return Status::error(Code::kInvalid, "I/O options: " + problems);
}

File::File(std::shared_ptr<detail::FileState> state)
    : state_(std::move(state)) {}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    close();
    state_ = std::move(other.state_);
  }
  return *this;
}

const std::string& File::path() const {
  static const std::string none;
  return state_ != nullptr ? state_->path : none;
}
std::uint64_t File::bytes() const {
  return state_ != nullptr ? state_->bytes.load() : 0;
}
bool File::direct() const { return state_ != nullptr && state_->opened.direct; }

void File::close() {
  if (state_ != nullptr) state_->pump->close(*state_);
  state_.reset();
}

Request::Request(std::shared_ptr<detail::RequestState> state)
    : state_(std::move(state)) {}

Request::~Request() { finish(); }

Request& Request::operator=(Request&& other) noexcept {
  if (this != &other) {
    finish();
    state_ = std::move(other.state_);
  }
  return *this;
}

// The disk must be done with the memory before its owner goes on.
void Request::finish() {
  if (state_ == nullptr) return;
  state_->wait();
  if (!state_->seen && !state_->status.ok()) {
    log(LogLevel::kError, "io: nobody asked for the outcome of a request: %s",
        state_->status.text().c_str());
  }
  state_.reset();
}

bool Request::done() const { return state_ == nullptr || state_->done != 0; }

Status Request::wait() {
  if (state_ == nullptr) return {};
  state_->wait();
  state_->seen = true;
  return state_->status;
}

Status wait_all(std::span<Request> requests) {
  Status first;
  for (Request& request : requests) {
    Status status = request.wait();
    if (first.ok()) first = status;
  }
  return first;
}

Registration& Registration::operator=(Registration&& other) noexcept {
  if (this != &other) {
    release();
    pump_ = std::move(other.pump_);
    slots_ = std::move(other.slots_);
  }
  return *this;
}

void Registration::release() {
  if (pump_ != nullptr) pump_->unregister_memory(slots_);
  pump_.reset();
  slots_.clear();
}

Plug::Plug() { detail::Pump::begin_plug(this); }
Plug::~Plug() { detail::Pump::end_plug(this); }

Result<std::unique_ptr<Io>> Io::create(const Options& options) {
  ZINF_ASSIGN(auto pump, detail::Pump::create(options));
  return std::unique_ptr<Io>(new Io(std::move(pump)));
}

Io::Io(std::shared_ptr<detail::Pump> pump) : pump_(std::move(pump)) {}
Io::~Io() { shutdown(); }

Result<File> Io::open(const std::string& path, const OpenOptions& options) {
  if (creates(options.mode) && options.bytes == 0) {
    return Status::error(Code::kInvalid,
                         "create " + path + ": a file of zero bytes");
  }
  if (options.bytes > static_cast<std::uint64_t>(INT64_MAX)) {
    return Status::system("create", path, EFBIG);
  }
  ZINF_ASSIGN(OpenedFile opened, pump_->open(path, options));
  if (!opened.note.empty() && this->options().caching == Caching::kDirect &&
      backend() != Backend::kMemory) {
    log(LogLevel::kWarning, "io: %s goes through the page cache: %s",
        options.name.empty() ? path.c_str() : options.name.c_str(),
        opened.note.c_str());
  }
  auto state = std::make_shared<detail::FileState>();
  state->pump = pump_;
  state->path = options.name.empty() ? path : options.name;
  state->opened = opened;
  state->bytes = opened.bytes;
  return File(std::move(state));
}

Status Io::remove(const std::string& path) { return pump_->remove(path); }

Status Io::resize(const File& file, std::uint64_t bytes) {
  if (file.state_ == nullptr) {
    return Status::error(Code::kInvalid, "resize: the file is not open");
  }
  ZINF_CHECK(file.state_->pump == pump_, "%s belongs to another Io",
             file.state_->path.c_str());
  if (bytes == 0 || bytes > static_cast<std::uint64_t>(INT64_MAX)) {
    return Status::system("resize", file.path(), bytes == 0 ? EINVAL : EFBIG);
  }
  return pump_->resize(*file.state_, bytes);
}

Request Io::read(const File& file, std::uint64_t offset,
                 std::span<std::byte> into) {
  return submit(Operation::kRead, file, offset, into.data(), into.size());
}

Request Io::write(const File& file, std::uint64_t offset,
                  std::span<const std::byte> from) {
  // The driver's operation has one data pointer; a write only reads from it.
  auto* data = const_cast<std::byte*>(from.data());
  return submit(Operation::kWrite, file, offset, data, from.size());
}

Request Io::sync(const File& file) {
  return submit(Operation::kSync, file, 0, nullptr, 0);
}

Request Io::submit(Operation operation, const File& file, std::uint64_t offset,
                   std::byte* data, std::size_t bytes) {
  auto request = std::make_shared<detail::RequestState>();
  if (file.state_ == nullptr) {
    request->finish(Status::error(
        Code::kInvalid,
        strf("%s: the file is not open", operation_name(operation).data())));
    return Request(std::move(request));
  }
  ZINF_CHECK(file.state_->pump == pump_, "%s belongs to another Io",
             file.state_->path.c_str());
  request->operation = operation;
  request->file = file.state_;
  request->offset = offset;
  request->data = data;
  request->bytes = bytes;
  Status status = check_transfer(operation, *file.state_, offset, bytes);
  if (status.ok()) {
    pump_->submit(request);
  } else {
    request->finish(std::move(status));
  }
  return Request(std::move(request));
}

void Io::drain() { pump_->drain(); }
void Io::shutdown() { pump_->shutdown(); }

Registration Io::register_memory(std::span<std::byte> memory) {
  Registration registration;
  registration.slots_ = pump_->register_memory(memory);
  registration.pump_ = pump_;
  return registration;
}

Backend Io::backend() const { return pump_->backend(); }
const std::string& Io::reason() const { return pump_->reason(); }
const Options& Io::options() const { return pump_->options(); }
Stats Io::stats() const { return pump_->stats(); }

}  // namespace zinf::io
