#include "zinf/store.h"

#include <algorithm>
#include <bit>

#include "src/base/align.h"
#include "src/base/strf.h"
#include "src/tier/store_impl.h"
#include "zinf/log.h"

namespace zinf {
namespace {

// The disk must be done with the memory before its owner goes on.
template <typename Op>
void finish(std::shared_ptr<Op>& op) {
  if (op == nullptr) return;
  Status status = op->wait();
  if (!status.ok() && !op->asked) {
    log(LogLevel::kError, "store: nobody asked for the outcome: %s",
        status.text().c_str());
  }
  op.reset();
}

template <typename Op>
Status wait_for(const std::shared_ptr<Op>& op) {
  if (op == nullptr) return {};
  op->asked = true;
  return op->wait();
}

}  // namespace

Status StoreOptions::validate() const {
  std::string problems;
  auto complain = [&](const std::string& problem) {
    problems += (problems.empty() ? "" : "; ") + problem;
  };
  if (paths.empty()) complain("no path is given");
  if (paths.size() > tier::kMaxVolumes) complain("over 256 paths are given");
  for (const StorePath& path : paths) {
    if (path.path.empty()) complain("a path is empty");
    if (!(path.weight >= 0)) complain(strf("a weight is %g", path.weight));
  }
  if (kept < 0 || kept > 1000) complain(strf("kept is %d", kept));
  if (durability.once && kept < 1) {
    complain("what is written once must be kept");
  }
  if (!std::has_single_bit(block_bytes) || block_bytes < kPage ||
      block_bytes > 64 * kMiB) {
    complain(
        strf("block is %zu bytes, it must be a power of two from 4 KiB to "
             "64 MiB",
             block_bytes));
  }
  constexpr std::uint64_t kMost = std::uint64_t{1} << 60;
  if (state_bytes > kMost || num_states > kMost / kPage ||
      extra_bytes > kMost) {
    complain("the sizes are beyond any disk");
  }
  Status inner = io.validate();
  if (!inner.ok()) complain(inner.text());
  if (problems.empty()) return {};
  return Status::error(Code::kInvalid, "store options: " + problems);
}

std::uint64_t StoreOptions::data_bytes() const {
  constexpr std::uint64_t kAlign = kPage;
  std::uint64_t copies =
      durability.copies() + static_cast<std::uint64_t>(std::max(kept, 0));
  // A state ends in a page of its own; a new extra is written before the old
  // one goes.
  std::uint64_t states = align_up(state_bytes, kAlign) + num_states * kPage;
  return copies * states + (copies + 1) * align_up(extra_bytes, kAlign);
}

std::string VersionInfo::label() const {
  std::string text = strf("step %llu", static_cast<unsigned long long>(step));
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? " (" : ", ") + names[i];
  }
  return names.empty() ? text : text + ")";
}

Store::Write::~Write() { finish(op_); }
Store::Write::Write(Write&& other) noexcept = default;
Store::Write& Store::Write::operator=(Write&& other) noexcept {
  if (this != &other) {
    finish(op_);
    op_ = std::move(other.op_);
  }
  return *this;
}
bool Store::Write::done() const { return op_ == nullptr || op_->done(); }
Status Store::Write::wait() { return wait_for(op_); }

Store::Read::~Read() { finish(op_); }
Store::Read::Read(Read&& other) noexcept = default;
Store::Read& Store::Read::operator=(Read&& other) noexcept {
  if (this != &other) {
    finish(op_);
    op_ = std::move(other.op_);
  }
  return *this;
}
bool Store::Read::done() const { return op_ == nullptr || op_->done(); }
Status Store::Read::wait() { return wait_for(op_); }

Store::Store(std::unique_ptr<tier::StoreImpl> impl) : impl_(std::move(impl)) {}
Store::~Store() = default;

Result<std::unique_ptr<Store>> Store::create(const StoreOptions& options) {
  ZINF_ASSIGN(auto impl, tier::StoreImpl::create(options));
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

Result<std::unique_ptr<Store>> Store::open(const StoreOptions& options) {
  ZINF_ASSIGN(auto impl, tier::StoreImpl::open(options));
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

Result<StateId> Store::define(const StateSpec& spec) {
  return impl_->define(spec);
}
Result<StateId> Store::find(const std::string& unit,
                            const std::string& state) const {
  return impl_->find(unit, state);
}
std::vector<StateSpec> Store::states() const { return impl_->states(); }
bool Store::has_content(StateId id) const { return impl_->has_content(id); }
Status Store::link(const std::string& path) {
  return impl_->volumes().link(path);
}
Status Store::discard(StateId id) { return impl_->discard(id); }
Status Store::remove(StateId id) { return impl_->remove(id); }
Status Store::reserve(std::uint64_t state_bytes, std::size_t num_states) {
  return impl_->reserve(state_bytes, num_states);
}
Store::Write Store::put(StateId id, std::span<const std::byte> from) {
  return impl_->put(id, from);
}
Store::Read Store::get(StateId id, std::span<std::byte> into) {
  return impl_->get(id, into);
}
Status Store::set_extra(std::span<const std::byte> extra) {
  return impl_->set_extra(extra);
}
Result<std::vector<std::byte>> Store::extra() { return impl_->extra(); }
Status Store::begin_step() { return impl_->begin_step(); }
Status Store::end_step(std::uint64_t step) {
  return due(step) ? commit(step) : Status();
}
bool Store::due(std::uint64_t step) const {
  return impl_->options().durability.due(step);
}
Status Store::commit(std::uint64_t step) { return impl_->commit(step); }
Status Store::keep(const std::string& name) { return impl_->keep(name); }
Status Store::drop(const std::string& name) { return impl_->drop(name); }
Status Store::rollback() { return impl_->rollback(); }
Status Store::load(std::uint64_t version) { return impl_->load(version); }
Result<VersionInfo> Store::load_intact(std::uint64_t version) {
  return impl_->load_intact(version);
}
std::vector<VersionInfo> Store::versions() const { return impl_->versions(); }
Result<VersionInfo> Store::find_version(const std::string& name) const {
  for (VersionInfo& info : impl_->versions()) {
    if (std::find(info.names.begin(), info.names.end(), name) !=
        info.names.end()) {
      return std::move(info);
    }
  }
  return Status::error(Code::kNotFound, "there is no version " + name);
}
Result<std::vector<StateSpec>> Store::contents(std::uint64_t version) const {
  return impl_->contents(version);
}
Result<std::vector<Damage>> Store::verify(const Progress& progress) {
  return impl_->verify(progress);
}
void Store::set_verify(Verify verify) { impl_->set_verify(verify); }

std::vector<io::Registration> Store::register_memory(
    std::span<std::byte> memory) {
  return impl_->volumes().register_memory(memory);
}
Status Store::damage() const { return impl_->damage(); }
StoreStats Store::stats() const { return impl_->stats(); }
std::vector<std::string> Store::paths() const {
  std::vector<std::string> paths;
  paths.reserve(impl_->volumes().count());
  for (std::size_t i = 0; i < impl_->volumes().count(); ++i) {
    paths.push_back(impl_->volumes().directory(i));
  }
  return paths;
}
std::vector<double> Store::weights() const {
  return impl_->volumes().weights();
}
std::size_t Store::block_bytes() const {
  return impl_->volumes().header().block_bytes;
}

}  // namespace zinf
