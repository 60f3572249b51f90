#include "src/io/memory_disk.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "src/base/check.h"
#include "src/io/driver.h"

namespace zinf::io {
namespace {

using Bytes = std::vector<std::byte>;

using Change = MemoryDisk::Impl::Change;

// What lies beyond the end, because a new size was lost, is lost too.
void apply(const Change& change, std::size_t begin, std::size_t end,
           Bytes& image) {
  std::size_t size = image.size();
  std::size_t most = size - std::min<std::size_t>(change.offset, size);
  end = std::min(end, most);
  if (begin >= end) return;
  std::memcpy(image.data() + change.offset + begin, change.data.data() + begin,
              end - begin);
}

void apply(const Change& change, Bytes& image) {
  if (change.size) image.resize(*change.size);
  apply(change, 0, change.data.size(), image);
}

// All of the change, nothing, or some of its sectors.
void apply_some(const Change& change, std::mt19937_64& random, Bytes& image) {
  std::uint64_t fate = random() % 4;
  if (fate == 0) return;
  if (fate == 1) return apply(change, image);
  if (change.size && random() % 2 == 0) return apply(change, image);
  std::size_t sector = fate == 2 ? 512 : 4096;
  // Sectors of the disk, not of the write: the first may be shorter.
  std::size_t begin = 0;
  while (begin < change.data.size()) {
    std::size_t left = sector - (change.offset + begin) % sector;
    std::size_t end = std::min(begin + left, change.data.size());
    if (random() % 2 == 0) apply(change, begin, end, image);
    begin = end;
  }
}

}  // namespace

Result<std::shared_ptr<MemoryDisk::Impl::File>> MemoryDisk::Impl::open(
    const std::string& path, const OpenOptions& options) {
  MutexLock lock(mutex_);
  auto found = files_.find(path);
  if (!creates(options.mode)) {
    if (found == files_.end()) return Status::system("open", path, ENOENT);
    return found->second;
  }
  if (options.mode == Open::kCreate && found != files_.end()) {
    return Status::system("create", path, EEXIST);
  }
  auto file = std::make_shared<File>();
  file->now.resize(options.bytes);
  file->durable.resize(options.bytes);
  files_[path] = file;
  return file;
}

Status MemoryDisk::Impl::remove(const std::string& path) {
  MutexLock lock(mutex_);
  if (files_.erase(path) == 1) return {};
  return Status::system("remove", path, ENOENT);
}

Status MemoryDisk::Impl::resize(File& file, const std::string& path,
                                std::uint64_t bytes) {
  MutexLock lock(mutex_);
  if (!has_power()) return Status::system("resize", path, EIO);
  file.now.resize(bytes);
  file.unsynced.push_back({.size = bytes});
  return {};
}

bool MemoryDisk::Impl::exists(const std::string& path) const {
  MutexLock lock(mutex_);
  return files_.contains(path);
}

std::uint64_t MemoryDisk::Impl::bytes(const File& file) const {
  MutexLock lock(mutex_);
  return file.now.size();
}

std::int64_t MemoryDisk::Impl::read(const File& file, std::uint64_t offset,
                                    std::span<std::byte> into) const {
  MutexLock lock(mutex_);
  std::size_t size = file.now.size();
  std::size_t bytes =
      std::min<std::uint64_t>(into.size(), size - std::min(offset, size));
  std::memcpy(into.data(), file.now.data() + offset, bytes);
  return static_cast<std::int64_t>(bytes);
}

std::int64_t MemoryDisk::Impl::write(File& file, std::uint64_t offset,
                                     std::span<const std::byte> from) {
  MutexLock lock(mutex_);
  if (!has_power()) return -EIO;
  std::size_t size = file.now.size();
  std::size_t bytes =
      std::min<std::uint64_t>(from.size(), size - std::min(offset, size));
  std::memcpy(file.now.data() + offset, from.data(), bytes);
  Bytes data(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(bytes));
  file.unsynced.push_back({.offset = offset, .data = std::move(data)});
  return static_cast<std::int64_t>(bytes);
}

std::int64_t MemoryDisk::Impl::sync(File& file) {
  MutexLock lock(mutex_);
  if (!has_power()) return -EIO;
  for (const Change& change : file.unsynced) apply(change, file.durable);
  file.unsynced.clear();
  return 0;
}

bool MemoryDisk::Impl::has_power() {
  if (operations_ >= last_) return false;
  ++operations_;
  return true;
}

void MemoryDisk::Impl::copy_after_crash(Impl& to, std::uint64_t seed) const {
  std::mt19937_64 random(seed);
  MutexLock lock(mutex_);
  MutexLock to_lock(to.mutex_);
  for (const auto& [path, file] : files_) {
    auto copy = std::make_shared<File>();
    copy->durable = file->durable;
    for (const Change& change : file->unsynced) {
      apply_some(change, random, copy->durable);
    }
    copy->now = copy->durable;
    to.files_[path] = std::move(copy);
  }
}

void MemoryDisk::Impl::cut_power_after(std::uint64_t operations) {
  MutexLock lock(mutex_);
  last_ = operations_ + operations;
}

std::uint64_t MemoryDisk::Impl::operations() const {
  MutexLock lock(mutex_);
  return operations_;
}

std::uint64_t MemoryDisk::Impl::unsynced_writes() const {
  MutexLock lock(mutex_);
  std::uint64_t count = 0;
  for (const auto& [path, file] : files_) count += file->unsynced.size();
  return count;
}

void MemoryDisk::Impl::flip_bit(const std::string& path, std::uint64_t offset) {
  MutexLock lock(mutex_);
  auto found = files_.find(path);
  ZINF_CHECK(found != files_.end(), "no file %s", path.c_str());
  ZINF_CHECK(offset < found->second->now.size(), "beyond %s", path.c_str());
  found->second->now[offset] ^= std::byte{1};
  found->second->durable[offset] ^= std::byte{1};
}

void MemoryDisk::Impl::truncate(const std::string& path, std::uint64_t bytes) {
  MutexLock lock(mutex_);
  auto found = files_.find(path);
  ZINF_CHECK(found != files_.end(), "no file %s", path.c_str());
  File& file = *found->second;
  file.now.resize(bytes);
  file.durable.resize(bytes);
  std::erase_if(file.unsynced, [&](const Change& change) {
    return change.size || change.offset + change.data.size() > bytes;
  });
}

MemoryDisk::MemoryDisk() : impl_(std::make_unique<Impl>()) {}
MemoryDisk::~MemoryDisk() = default;

std::shared_ptr<MemoryDisk> MemoryDisk::after_crash(std::uint64_t seed) const {
  auto disk = std::make_shared<MemoryDisk>();
  impl_->copy_after_crash(*disk->impl_, seed);
  return disk;
}

void MemoryDisk::cut_power_after(std::uint64_t operations) {
  impl_->cut_power_after(operations);
}
std::uint64_t MemoryDisk::operations() const { return impl_->operations(); }
std::uint64_t MemoryDisk::unsynced_writes() const {
  return impl_->unsynced_writes();
}
void MemoryDisk::flip_bit(const std::string& path, std::uint64_t offset) {
  impl_->flip_bit(path, offset);
}
void MemoryDisk::truncate(const std::string& path, std::uint64_t bytes) {
  impl_->truncate(path, bytes);
}
bool MemoryDisk::exists(const std::string& path) const {
  return impl_->exists(path);
}

}  // namespace zinf::io
