#include "src/tier/volumes.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "src/tier/new_directory.h"
#include "zinf/bytes.h"
#include "zinf/disk.h"
#include "zinf/io_bench.h"
#include "zinf/log.h"

namespace zinf::tier {
namespace {

constexpr std::uint64_t kAlign = kUnit;
constexpr std::uint64_t kMeasuredBytes = 64 * kMiB;

// What a limit holds besides the volume: the directory and its lock, and what
// the file system needs to know where the volume's pieces are (ext4: a page for
// every 340 of them).
constexpr std::uint64_t kBesides = 64 * kKiB;
constexpr std::uint64_t kVolumePerPieces = 512;

// The largest volume that a limit allows, and the limit that a volume needs.
std::uint64_t volume_within(std::uint64_t limit) {
  std::uint64_t besides = kBesides + limit / kVolumePerPieces;
  return limit - std::min(limit, besides);
}
std::uint64_t limit_for(std::uint64_t volume) {
  return volume + kBesides + volume / (kVolumePerPieces - 1) + kUnit;
}

// Rounded, unless they look the same then.
std::string needed_and_found(std::uint64_t needed, std::uint64_t found) {
  std::string left = format_bytes(needed);
  std::string right = format_bytes(found);
  if (left == right) {
    left = std::to_string(needed) + " B";
    right = std::to_string(found) + " B";
  }
  return left + " needed, " + right + " found";
}

Uuid make_uuid() {
  std::random_device random;
  Uuid uuid{};
  for (std::byte& byte : uuid) byte = static_cast<std::byte>(random());
  return uuid;
}

std::uint64_t sum(const std::vector<std::uint64_t>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
}

std::uint64_t sum(const std::vector<Piece>& pieces) {
  std::uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

// Splits `bytes` by weight; what a path has no room for goes to the others.
// False when all together have too little; `sizes` then holds the wishes.
bool split(std::uint64_t bytes, std::span<const double> weights,
           std::span<const std::uint64_t> room,
           std::vector<std::uint64_t>& sizes) {
  auto share = [&](std::uint64_t total, const std::vector<bool>& full) {
    double sum = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i)
      sum += full[i] ? 0 : weights[i];
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (full[i]) continue;
      double part = static_cast<double>(total) * weights[i] / sum;
      sizes[i] = align_up(static_cast<std::uint64_t>(std::ceil(part)), kAlign);
    }
  };
  sizes.assign(weights.size(), 0);
  std::vector<bool> full(weights.size(), false);
  share(bytes, full);
  std::vector<std::uint64_t> wishes = sizes;
  std::uint64_t left = bytes;
  for (std::size_t round = 0; round < weights.size(); ++round) {
    bool changed = false;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      std::uint64_t most = align_down(room[i], kAlign);
      if (full[i] || sizes[i] <= most) continue;
      sizes[i] = most;
      full[i] = true;
      left -= std::min(left, most);
      changed = true;
    }
    if (!changed) return true;
    if (std::all_of(full.begin(), full.end(), [](bool x) { return x; })) break;
    share(left, full);
  }
  sizes = wishes;
  return false;
}

}  // namespace

Volumes::Volumes(const StoreOptions& options)
    : on_disk_(options.io.backend != io::Backend::kMemory),
      files_(on_disk_ ? options.files : Files::kNamed),
      advice_(options.durability.once ? "free space or save elsewhere"
              : options.kept == 0
                  ? "free space, raise the limit or name more paths"
                  : "free space, name more paths or keep fewer versions") {}

PageBuffer::PageBuffer(std::size_t bytes)
    : bytes_(align_up(std::max<std::size_t>(bytes, 1), kUnit)),
      data_(static_cast<std::byte*>(std::aligned_alloc(kUnit, bytes_))) {
  ZINF_CHECK(data_ != nullptr, "no memory for %zu bytes", bytes_);
  std::memset(data_.get(), 0, bytes_);
}

void PageBuffer::Free::operator()(std::byte* data) const { std::free(data); }

std::uint64_t metadata_bytes_for(const StoreOptions& options) {
  // Per state its names and shape, per block a checksum and a piece, with room
  // for fragmentation; every version has a table, and two more are in the
  // making. Catalogs are small.
  std::uint64_t blocks = options.state_bytes / options.block_bytes;
  std::uint64_t table = 4096 + options.num_states * 512 + blocks * 48;
  auto tables = static_cast<std::uint64_t>(options.kept) + 4;
  return align_up(tables * align_up(table, kAlign) + 256 * kKiB, kAlign);
}

Status Volumes::make_io(const StoreOptions& options, const StorePath& path,
                        Volume& volume) {
  io::Options io = options.io;
  io.faults.insert(io.faults.end(), path.faults.begin(), path.faults.end());
  ZINF_ASSIGN(volume.io, io::Io::create(io));
  volume.directory = path.path;
  volume.limit_bytes = path.limit_bytes;
  volume.weight = path.weight;
  return {};
}

Result<std::shared_ptr<Volumes>> Volumes::create(const StoreOptions& options) {
  std::shared_ptr<Volumes> volumes(new Volumes(options));
  for (const StorePath& path : options.paths) {
    ZINF_TRY(volumes->make_io(options, path, volumes->volumes_.emplace_back()));
  }
  Status status = volumes->make_files(options);
  if (!status.ok()) {
    volumes->remove_files();
    return status;
  }
  return volumes;
}

std::string Volumes::file(std::size_t volume) const {
  const std::string& directory = volumes_[volume].directory;
  if (files_ == Files::kNamed) return volume_file(directory);
  return strf("%s/(%s-of-process-%d)", directory.c_str(),
              files_ == Files::kScratch ? "scratch" : "save",
              static_cast<int>(getpid()));
}

void Volumes::remove_files() {
  for (Volume& volume : volumes_) {
    volume.file.close();
    volume.nameless.reset();
    if (!on_disk_ && volume.made_file) {
      (void)volume.io->remove(volume_file(volume.directory));
    }
    if (volume.run.fd() < 0) continue;
    if (volume.made_file) unlinkat(volume.run.fd(), kVolumeName, 0);
    if (!volume.run.made()) continue;
    volume.run.remove_lock();
    rmdir(volume.directory.c_str());
  }
}

Status Volumes::link(const std::string& path) {
  if (files_ != Files::kUnlinked || volumes_.size() != 1) {
    return Status::error(Code::kInvalid,
                         "link: the store was not made for that");
  }
  return link_volume(*volumes_[0].nameless, path);
}

Status Volumes::make_directory(Volume& volume) {
  if (files_ == Files::kScratch) {
    ZINF_ASSIGN(volume.nameless, io::Scratch::open(volume.directory));
    return {};
  }
  if (files_ == Files::kUnlinked) {
    ZINF_ASSIGN(volume.nameless, io::Scratch::open_linkable(volume.directory));
    return {};
  }
  ZINF_ASSIGN(volume.run, RunDirectory::make(volume.directory));
  struct stat info{};
  if (fstatat(volume.run.fd(), kVolumeName, &info, AT_SYMLINK_NOFOLLOW) != 0) {
    return {};
  }
  return Status::error(Code::kInvalid,
                       volume.directory +
                           " holds a store already: open it, or remove it with "
                           "zinf checkpoint prune");
}

Status Volumes::make_file(Volume& volume, std::uint64_t bytes) {
  io::OpenOptions options{.mode = io::Open::kCreate, .bytes = bytes};
  std::string path = volume_file(volume.directory);
  if (volume.nameless) {
    options.mode = io::Open::kReplace;
    path = volume.nameless->path();
  } else if (on_disk_) {
    options.directory = volume.run.fd();
    path = kVolumeName;
  }
  options.name = file(static_cast<std::size_t>(&volume - volumes_.data()));
  ZINF_ASSIGN(volume.file, volume.io->open(path, options));
  volume.made_file = true;
  return {};
}

Status Volumes::make_files(const StoreOptions& options) {
  if (on_disk_) {
    for (Volume& volume : volumes_) ZINF_TRY(make_directory(volume));
  }
  ZINF_TRY(measure(options));
  std::uint64_t metadata = metadata_bytes_for(options);
  // Volume 0 must hold the metadata, each a little of everything else.
  std::vector<std::uint64_t> least(volumes_.size(), kDataBegin + kUnit);
  least[0] += metadata;
  std::uint64_t needed =
      options.data_bytes() + volumes_.size() * kDataBegin + metadata;
  Capacity capacity{.volume_bytes = {},
                    .metadata = {{0, kDataBegin, metadata}},
                    .state_bytes = options.state_bytes,
                    .num_states = options.num_states};
  std::vector<std::uint64_t> none(volumes_.size(), 0);
  ZINF_ASSIGN(capacity.volume_bytes, share_out(none, least, needed));
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    ZINF_TRY(make_file(volumes_[i], capacity.volume_bytes[i]));
  }
  return write_headers(options, capacity);
}

// How large each volume can be. Paths on one disk share what it has evenly, but
// what one may not take is left to the others.
Result<std::vector<std::uint64_t>> Volumes::find_room() const {
  std::vector<std::uint64_t> room(volumes_.size(), std::uint64_t{INT64_MAX});
  std::map<std::uint64_t, std::vector<std::size_t>> sharers;
  std::map<std::uint64_t, std::uint64_t> free;
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    const Volume& volume = volumes_[i];
    if (volume.limit_bytes != 0) room[i] = volume_within(volume.limit_bytes);
    if (!on_disk_) continue;
    struct statvfs disk{};
    struct stat info{};
    const char* path = volume.directory.c_str();
    if (statvfs(path, &disk) != 0 || stat(path, &info) != 0) {
      return Status::system("inspect", path, errno);
    }
    free[info.st_dev] = std::uint64_t{disk.f_bavail} * disk.f_frsize;
    sharers[info.st_dev].push_back(i);
  }
  for (auto& [device, paths] : sharers) {
    auto more = [&](std::size_t i) {  // than it has, within its limit
      return room[i] - std::min(room[i], volumes_[i].file.bytes());
    };
    std::ranges::sort(paths, {}, more);
    std::uint64_t left = free[device];
    for (std::size_t taken = 0; taken < paths.size(); ++taken) {
      std::size_t i = paths[taken];
      std::uint64_t share = std::min(left / (paths.size() - taken), more(i));
      room[i] = volumes_[i].file.bytes() + share;
      left -= share;
    }
  }
  return room;
}

// The volumes' sizes with `more` bytes split by weight on top of `now`, but
// each at least its `least`.
Result<std::vector<std::uint64_t>> Volumes::share_out(
    const std::vector<std::uint64_t>& now,
    const std::vector<std::uint64_t>& least, std::uint64_t more) const {
  ZINF_ASSIGN(std::vector<std::uint64_t> room, find_room());
  std::vector<std::uint64_t> spare(room.size());
  for (std::size_t i = 0; i < room.size(); ++i) {
    spare[i] = room[i] - std::min(room[i], now[i]);
  }
  std::vector<std::uint64_t> sizes;
  bool fits = split(more, weights_, spare, sizes);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    sizes[i] = std::max(sizes[i] + now[i], least[i]);
    if (sizes[i] > now[i] && sizes[i] > room[i]) fits = false;
  }
  if (fits) return sizes;
  std::string text =
      strf("the store needs %s", format_bytes(sum(now) + more).c_str());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text += strf("%s %s: ", i == 0 ? ":" : ",", volumes_[i].directory.c_str());
    std::uint64_t limit = volumes_[i].limit_bytes;
    if (limit == 0 || room[i] < volume_within(limit)) {
      text += needed_and_found(sizes[i], room[i]);
    } else {
      text += needed_and_found(limit_for(sizes[i]), limit) + " (its limit)";
    }
  }
  return Status::error(Code::kNoSpace, text + "; " + advice_);
}

Result<Capacity> Volumes::grown(const Capacity& now, std::uint64_t state_bytes,
                                std::uint64_t num_states) const {
  // What follows must not wrap.
  std::uint64_t most = (std::uint64_t{1} << 60) / (header_.kept + 3);
  if (state_bytes > most || num_states > most / kUnit) {
    return Status::error(Code::kInvalid,
                         "room for that much is beyond any disk");
  }
  Capacity next = now;
  next.state_bytes = std::max(now.state_bytes, state_bytes);
  next.num_states = std::max(now.num_states, num_states);
  StoreOptions wanted{.durability = {.every = header_.copies == 2 ? 1u : 0u,
                                     .once = header_.copies == 0},
                      .state_bytes = next.state_bytes,
                      .num_states = next.num_states,
                      .kept = static_cast<int>(header_.kept),
                      .extra_bytes = header_.extra_bytes,
                      .block_bytes = header_.block_bytes};
  std::uint64_t set_aside = sum(now.metadata);
  std::uint64_t metadata = metadata_bytes_for(wanted);
  // Twice as much at least, so that the superblock has room for the regions
  // however often the store grows.
  metadata =
      metadata > set_aside ? std::max(metadata - set_aside, set_aside) : 0;
  std::uint64_t taken = now.volume_bytes.size() * kDataBegin + set_aside;
  std::uint64_t data = sum(now.volume_bytes) - taken;
  std::uint64_t needed = wanted.data_bytes();
  std::uint64_t more = metadata + (needed > data ? needed - data : 0);
  std::vector<std::uint64_t> least = now.volume_bytes;
  least[0] += metadata;
  ZINF_ASSIGN(next.volume_bytes, share_out(now.volume_bytes, least, more));
  if (metadata == 0) return next;
  next.metadata.push_back({0, now.volume_bytes[0], metadata});
  if (next.metadata.size() <= kMaxRegions) return next;
  return Status::error(
      Code::kNoSpace,
      strf("the store cannot grow more often than %zu times", kMaxRegions));
}

Status Volumes::extend(const Capacity& to) {
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    Volume& volume = volumes_[i];
    if (volume.file.bytes() >= to.volume_bytes[i]) continue;
    ZINF_TRY(volume.io->resize(volume.file, to.volume_bytes[i]));
  }
  return {};
}

void Volumes::cut(const Capacity& to) {
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    Volume& volume = volumes_[i];
    if (volume.file.bytes() <= to.volume_bytes[i]) continue;
    Status status = volume.io->resize(volume.file, to.volume_bytes[i]);
    if (status.ok()) continue;
    log(LogLevel::kWarning, "store: %s stays larger than it need be: %s",
        file(i).c_str(), status.text().c_str());
  }
}

Status Volumes::write_headers(const StoreOptions& options,
                              const Capacity& capacity) {
  Uuid uuid = make_uuid();
  for (std::size_t i = volumes_.size(); i-- > 0;) {
    header_ = {.uuid = uuid,
               .index = static_cast<std::uint32_t>(i),
               .count = static_cast<std::uint32_t>(volumes_.size()),
               .block_bytes = options.block_bytes,
               .extra_bytes = options.extra_bytes,
               .kept = static_cast<std::uint32_t>(options.kept),
               .copies = options.durability.copies()};
    PageBuffer page(kUnit);
    Page encoded;
    encode(header_, encoded);
    std::copy(encoded.begin(), encoded.end(), page.span().begin());
    Volume& volume = volumes_[i];
    ZINF_TRY(volume.io->write(volume.file, 0, page.span()).wait());
  }
  Page first;
  encode(
      Superblock{
          .uuid = uuid, .sequence = 1, .capacity = capacity, .catalog = {}},
      first);
  ZINF_TRY(write_page(kSuperblocks, first));
  ZINF_TRY(sync_all());
  if (!on_disk_ || files_ != Files::kNamed) return {};
  for (const Volume& volume : volumes_) ZINF_TRY(volume.run.sync());
  return note_inodes();
}

Result<std::shared_ptr<Volumes>> Volumes::open(const StoreOptions& options) {
  std::shared_ptr<Volumes> volumes(new Volumes(options));
  for (const StorePath& path : options.paths) {
    ZINF_TRY(volumes->make_io(options, path, volumes->volumes_.emplace_back()));
  }
  ZINF_TRY(volumes->open_files(options));
  return volumes;
}

Status Volumes::open_files(const StoreOptions& options) {
  std::vector<VolumeHeader> headers;
  ZINF_TRY(open_headers(headers, options.access));
  ZINF_TRY(sort_by(headers));
  ZINF_TRY(measure(options));
  return on_disk_ ? note_inodes() : Status();
}

Status Volumes::open_headers(std::vector<VolumeHeader>& headers,
                             Access access) {
  for (Volume& volume : volumes_) {
    std::string file = volume_file(volume.directory);
    io::OpenOptions open{.name = file};
    if (access != Access::kWrite) open.mode = io::Open::kReadOnly;
    if (on_disk_) {
      ZINF_ASSIGN(volume.run, RunDirectory::open(volume.directory, access));
      open.directory = volume.run.fd();
    }
    ZINF_ASSIGN(volume.file,
                volume.io->open(on_disk_ ? kVolumeName : file, open));
    PageBuffer page(kUnit);
    if (volume.file.bytes() < kUnit) {
      return Status::error(
          Code::kCorrupt,
          file + " is not a volume: " + format_bytes(volume.file.bytes()));
    }
    ZINF_TRY(volume.io->read(volume.file, 0, page.span()).wait());
    Result<VolumeHeader> header = parse_volume_header(page.span());
    if (!header.ok()) return header.status().in(file);
    headers.push_back(*header);
    if (header->uuid != headers[0].uuid || header->count != headers[0].count) {
      return Status::error(Code::kInvalid,
                           strf("%s belongs to store %s, %s to store %s",
                                file.c_str(), uuid_text(header->uuid).c_str(),
                                volume_file(volumes_[0].directory).c_str(),
                                uuid_text(headers[0].uuid).c_str()));
    }
    if (volume.file.bytes() < kDataBegin) {
      return Status::error(
          Code::kCorrupt,
          file + " is truncated: " + format_bytes(volume.file.bytes()));
    }
  }
  return {};
}

// The paths may come in any order; the headers know theirs.
Status Volumes::sort_by(const std::vector<VolumeHeader>& headers) {
  std::vector<Volume> sorted(headers[0].count);
  std::vector<bool> there(headers[0].count, false);
  for (std::size_t i = 0; i < headers.size(); ++i) {
    std::uint32_t index = headers[i].index;
    if (there[index]) {
      return Status::error(
          Code::kInvalid, strf("volume %u of the store is named twice", index));
    }
    there[index] = true;
    if (index == 0) header_ = headers[i];
    sorted[index] = std::move(volumes_[i]);
  }
  for (std::size_t i = 0; i < there.size(); ++i) {
    if (there[i]) continue;
    return Status::error(
        Code::kNotFound,
        strf("volume %zu of the %u that make up store %s is missing: name all "
             "of its paths",
             i, headers[0].count, uuid_text(headers[0].uuid).c_str()));
  }
  volumes_ = std::move(sorted);
  return {};
}

Status Volumes::measure(const StoreOptions& options) {
  bool given = std::all_of(volumes_.begin(), volumes_.end(),
                           [](const Volume& v) { return v.weight > 0; });
  // Within every limit: what is measured takes space too.
  bool allowed =
      std::all_of(volumes_.begin(), volumes_.end(), [](const Volume& v) {
        return v.limit_bytes == 0 ||
               volume_within(v.limit_bytes) >= kMeasuredBytes;
      });
  bool measured = !given && allowed && volumes_.size() > 1 && on_disk_ &&
                  options.access == Access::kWrite;
  weights_.clear();
  for (Volume& volume : volumes_) {
    if (measured) {
      // With the path's own Io options, its limits included.
      ZINF_ASSIGN(io::Bench bench,
                  io::Bench::in_directory(volume.directory, kMeasuredBytes));
      ZINF_TRY(bench.open(volume.io->options()));
      ZINF_ASSIGN(io::Sample write, bench.run(io::Direction::kWrite));
      ZINF_ASSIGN(io::Sample read, bench.run(io::Direction::kRead));
      // A step reads and writes the same amount.
      volume.weight = 2 / (1 / read.gbps() + 1 / write.gbps());
      log(LogLevel::kInfo, "store: %s: %.2f GB/s", volume.directory.c_str(),
          volume.weight);
    }
    weights_.push_back(given || measured ? volume.weight : 1);
  }
  return {};
}

Volumes::~Volumes() = default;

Status Volumes::note_inodes() {
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    struct stat info{};
    if (fstatat(volumes_[i].run.fd(), kVolumeName, &info, 0) != 0) {
      return Status::system("stat", file(i), errno);
    }
    volumes_[i].inode = info.st_ino;
  }
  return {};
}

Status Volumes::check_sizes(const Capacity& capacity) const {
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    std::uint64_t found = volumes_[i].file.bytes();
    if (found >= capacity.volume_bytes[i]) continue;
    return Status::error(
        Code::kCorrupt,
        strf("%s is truncated: %llu bytes wanted, %llu found", file(i).c_str(),
             static_cast<unsigned long long>(capacity.volume_bytes[i]),
             static_cast<unsigned long long>(found)));
  }
  return {};
}

Status Volumes::check_files(const Capacity& capacity) const {
  // What has no name cannot be replaced.
  if (!on_disk_ || files_ != Files::kNamed) return {};
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    struct stat info{};
    if (fstatat(volumes_[i].run.fd(), kVolumeName, &info, 0) != 0) {
      return Status::system("stat", file(i), errno);
    }
    if (info.st_ino != volumes_[i].inode) {
      return Status::error(Code::kIo,
                           file(i) + " was replaced while it was in use");
    }
    auto bytes = static_cast<std::uint64_t>(info.st_size);
    if (bytes < capacity.volume_bytes[i]) {
      return Status::error(
          Code::kIo,
          strf("%s changed its size while it was in use: %llu bytes wanted, "
               "%llu found",
               file(i).c_str(),
               static_cast<unsigned long long>(capacity.volume_bytes[i]),
               static_cast<unsigned long long>(bytes)));
    }
  }
  return {};
}

io::Request Volumes::read(const Piece& piece, std::uint64_t skip,
                          std::span<std::byte> into) {
  Volume& volume = volumes_[piece.volume];
  return volume.io->read(volume.file, piece.offset + skip, into);
}

io::Request Volumes::write(const Piece& piece, std::uint64_t skip,
                           std::span<const std::byte> from) {
  Volume& volume = volumes_[piece.volume];
  return volume.io->write(volume.file, piece.offset + skip, from);
}

Status Volumes::sync(std::size_t volume) {
  return volumes_[volume].io->sync(volumes_[volume].file).wait();
}

Status Volumes::sync_all() {
  std::vector<io::Request> syncs;
  syncs.reserve(volumes_.size());
  for (Volume& volume : volumes_) {
    syncs.push_back(volume.io->sync(volume.file));
  }
  return io::wait_all(syncs);
}

Status Volumes::read_page(std::uint64_t offset, Page& page) {
  PageBuffer buffer(kUnit);
  ZINF_TRY(read({0, offset, kUnit}, 0, buffer.span()).wait());
  std::copy(buffer.span().begin(), buffer.span().end(), page.begin());
  return {};
}

Status Volumes::write_page(std::uint64_t offset, const Page& page) {
  PageBuffer buffer(kUnit);
  std::copy(page.begin(), page.end(), buffer.span().begin());
  return write({0, offset, kUnit}, 0, buffer.span()).wait();
}

Result<std::vector<std::byte>> Volumes::read_blob(const BlobRef& blob,
                                                  const std::string& what) {
  PageBuffer buffer(blob.bytes);
  std::vector<io::Request> requests;
  std::size_t done = 0;
  for (const Piece& piece : blob.pieces) {
    requests.push_back(
        read(piece, 0, buffer.span().subspan(done, piece.bytes)));
    done += piece.bytes;
  }
  ZINF_TRY(io::wait_all(requests).in(what));
  auto bytes = std::span<const std::byte>(buffer.span()).first(blob.bytes);
  std::uint64_t got = checksum(bytes);
  if (got != blob.checksum) {
    return Status::error(
        Code::kCorrupt,
        strf("the checksum of %s, %s at offset %llu: wanted %016llx, got "
             "%016llx",
             what.c_str(), file(0).c_str(),
             static_cast<unsigned long long>(blob.pieces[0].offset),
             static_cast<unsigned long long>(blob.checksum),
             static_cast<unsigned long long>(got)));
  }
  return std::vector<std::byte>(bytes.begin(), bytes.end());
}

Status Volumes::write_blob(const std::vector<Piece>& pieces,
                           std::span<const std::byte> blob) {
  PageBuffer buffer(blob.size());
  std::copy(blob.begin(), blob.end(), buffer.span().begin());
  std::vector<io::Request> requests;
  std::size_t done = 0;
  for (const Piece& piece : pieces) {
    requests.push_back(
        write(piece, 0, buffer.span().subspan(done, piece.bytes)));
    done += piece.bytes;
  }
  return io::wait_all(requests);
}

std::vector<io::Stats> Volumes::stats() const {
  std::vector<io::Stats> stats;
  for (const Volume& volume : volumes_) stats.push_back(volume.io->stats());
  return stats;
}

std::vector<io::Registration> Volumes::register_memory(
    std::span<std::byte> memory) {
  std::vector<io::Registration> registrations;
  registrations.reserve(volumes_.size());
  for (Volume& volume : volumes_) {
    registrations.push_back(volume.io->register_memory(memory));
  }
  return registrations;
}

}  // namespace zinf::tier
