#include "src/tier/volumes.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/disk.h"
#include "zinf/io_bench.h"
#include "zinf/log.h"

namespace zinf::tier {
namespace {

constexpr std::uint64_t kAlign = kUnit;
constexpr std::uint64_t kMeasuredBytes = 64 * kMiB;

Uuid make_uuid() {
  std::random_device random;
  Uuid uuid{};
  for (std::byte& byte : uuid) byte = static_cast<std::byte>(random());
  return uuid;
}

struct Room {
  std::uint64_t bytes = 0;  // that this path may take
  std::uint64_t device = 0;
};

// What each path's disk has; paths on one disk share it evenly.
Result<std::vector<std::uint64_t>> find_room(
    const std::vector<StorePath>& paths) {
  std::vector<Room> rooms;
  std::map<std::uint64_t, std::uint64_t> sharers;
  for (const StorePath& path : paths) {
    struct statvfs disk{};
    struct stat info{};
    if (statvfs(path.path.c_str(), &disk) != 0 ||
        stat(path.path.c_str(), &info) != 0) {
      return Status::system("inspect", path.path, errno);
    }
    rooms.push_back(
        {std::uint64_t{disk.f_bavail} * disk.f_frsize, info.st_dev});
    ++sharers[info.st_dev];
  }
  std::vector<std::uint64_t> found;
  for (std::size_t i = 0; i < rooms.size(); ++i) {
    std::uint64_t room = rooms[i].bytes / sharers[rooms[i].device];
    if (paths[i].limit_bytes != 0) room = std::min(room, paths[i].limit_bytes);
    found.push_back(room);
  }
  return found;
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

void Volumes::remove_files() {
  for (Volume& volume : volumes_) {
    if (volume.made_file) {
      volume.file.close();
      (void)volume.io->remove(volume_file(volume.directory));
    }
    if (!volume.made_directory) continue;
    unlink((volume.directory + "/" + kLockName).c_str());
    rmdir(volume.directory.c_str());
  }
}

Status Volumes::make_files(const StoreOptions& options) {
  if (on_disk_) {
    for (Volume& volume : volumes_) {
      ZINF_ASSIGN(volume.made_directory, make_directory(volume.directory));
      ZINF_ASSIGN(volume.lock, DirectoryLock::take(volume.directory));
      if (access(volume_file(volume.directory).c_str(), F_OK) == 0) {
        return Status::error(
            Code::kInvalid,
            volume.directory +
                " holds a store already: open it, or remove it with zinf "
                "checkpoint prune");
      }
    }
  }
  ZINF_TRY(measure(options));
  std::uint64_t metadata = metadata_bytes_for(options);
  std::uint64_t overhead = volumes_.size() * kDataBegin + metadata;
  std::uint64_t needed = options.data_bytes() + overhead;
  std::vector<std::uint64_t> room(volumes_.size(), std::uint64_t{INT64_MAX});
  if (on_disk_) {
    ZINF_ASSIGN(room, find_room(options.paths));
  }
  std::vector<std::uint64_t> sizes;
  bool fits = split(needed, weights_, room, sizes);
  // Volume 0 must hold the metadata and a little of everything else.
  std::uint64_t least = kDataBegin + metadata + kUnit;
  if (fits && sizes[0] < least) {
    sizes[0] = least;
    fits = room[0] >= least;
  }
  for (std::uint64_t& size : sizes) size = std::max(size, kDataBegin + kAlign);
  if (!fits) {
    std::string text = strf("the store needs %s", format_bytes(needed).c_str());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      text +=
          strf("%s %s: %s needed, %s found", i == 0 ? ":" : ",",
               volumes_[i].directory.c_str(), format_bytes(sizes[i]).c_str(),
               format_bytes(room[i]).c_str());
    }
    return Status::error(
        Code::kNoSpace,
        text + "; free space, name more paths or keep fewer versions");
  }
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    Volume& volume = volumes_[i];
    ZINF_ASSIGN(volume.file, volume.io->open(volume_file(volume.directory),
                                             {.mode = io::Open::kCreate,
                                              .bytes = sizes[i]}));
    volume.made_file = true;
  }
  return write_headers(options, sizes);
}

Status Volumes::write_headers(const StoreOptions& options,
                              const std::vector<std::uint64_t>& sizes) {
  geometry_ = {make_uuid(), options.block_bytes, sizes};
  for (std::size_t i = volumes_.size(); i-- > 0;) {
    header_ = {.uuid = geometry_.uuid,
               .index = static_cast<std::uint32_t>(i),
               .count = static_cast<std::uint32_t>(volumes_.size()),
               .volume_bytes = sizes[i],
               .block_bytes = options.block_bytes,
               .metadata_bytes = metadata_bytes_for(options),
               .state_bytes = options.state_bytes,
               .num_states = options.num_states,
               .extra_bytes = options.extra_bytes,
               .kept = static_cast<std::uint32_t>(options.kept),
               .copies = options.durability.every == 0 ? 1u : 2u};
    PageBuffer page(kUnit);
    Page encoded;
    encode(header_, encoded);
    std::copy(encoded.begin(), encoded.end(), page.span().begin());
    Volume& volume = volumes_[i];
    ZINF_TRY(volume.io->write(volume.file, 0, page.span()).wait());
  }
  Page first;
  encode(Superblock{.uuid = geometry_.uuid, .sequence = 1, .catalog = {}},
         first);
  ZINF_TRY(write_page(kSuperblocks, first));
  ZINF_TRY(sync_all());
  if (!on_disk_) return {};
  for (const Volume& volume : volumes_) {
    ZINF_TRY(sync_directory(volume.directory));
    ZINF_TRY(sync_directory(volume.directory + "/.."));
  }
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
  bool writing = options.access == Access::kWrite;
  std::vector<VolumeHeader> headers;
  for (Volume& volume : volumes_) {
    std::string file = volume_file(volume.directory);
    if (on_disk_ && access(file.c_str(), F_OK) != 0) {
      return Status::system("open the store", file, errno);
    }
    if (on_disk_ && writing) {
      ZINF_ASSIGN(volume.lock, DirectoryLock::take(volume.directory));
    }
    ZINF_ASSIGN(volume.file, volume.io->open(file, {}));
    PageBuffer page(kUnit);
    if (volume.file.bytes() < kUnit) {
      return Status::error(
          Code::kCorrupt,
          file + " is not a volume: " + format_bytes(volume.file.bytes()));
    }
    ZINF_TRY(volume.io->read(volume.file, 0, page.span()).wait());
    Result<VolumeHeader> header = parse_volume_header(page.span());
    if (!header.ok()) return header.status().in(file);
    if (header->uuid != (headers.empty() ? header->uuid : headers[0].uuid) ||
        header->count != (headers.empty() ? header->count : headers[0].count)) {
      return Status::error(Code::kInvalid,
                           strf("%s belongs to store %s, %s to store %s",
                                file.c_str(), uuid_text(header->uuid).c_str(),
                                volume_file(volumes_[0].directory).c_str(),
                                uuid_text(headers[0].uuid).c_str()));
    }
    if (volume.file.bytes() < header->volume_bytes) {
      std::string text =
          strf("%s is truncated: %llu bytes wanted, %llu found", file.c_str(),
               static_cast<unsigned long long>(header->volume_bytes),
               static_cast<unsigned long long>(volume.file.bytes()));
      if (writing) return Status::error(Code::kCorrupt, text);
      log(LogLevel::kWarning, "store: %s", text.c_str());
    }
    headers.push_back(*header);
  }
  // The paths may come in any order; the headers know theirs.
  std::vector<Volume> sorted(headers[0].count);
  std::vector<bool> there(headers[0].count, false);
  geometry_ = {headers[0].uuid, headers[0].block_bytes,
               std::vector<std::uint64_t>(headers[0].count)};
  for (std::size_t i = 0; i < headers.size(); ++i) {
    std::uint32_t index = headers[i].index;
    if (there[index]) {
      return Status::error(
          Code::kInvalid, strf("volume %u of the store is named twice", index));
    }
    there[index] = true;
    geometry_.volume_bytes[index] = headers[i].volume_bytes;
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
  ZINF_TRY(measure(options));
  return on_disk_ ? note_inodes() : Status();
}

Status Volumes::measure(const StoreOptions& options) {
  bool given = std::all_of(volumes_.begin(), volumes_.end(),
                           [](const Volume& v) { return v.weight > 0; });
  bool measured = !given && volumes_.size() > 1 && on_disk_ &&
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
    if (stat(file(i).c_str(), &info) != 0) {
      return Status::system("stat", file(i), errno);
    }
    volumes_[i].inode = info.st_ino;
  }
  return {};
}

Status Volumes::check_files() const {
  if (!on_disk_) return {};
  for (std::size_t i = 0; i < volumes_.size(); ++i) {
    struct stat info{};
    if (stat(file(i).c_str(), &info) != 0) {
      return Status::system("stat", file(i), errno);
    }
    if (info.st_ino != volumes_[i].inode) {
      return Status::error(Code::kIo,
                           file(i) + " was replaced while it was in use");
    }
    auto bytes = static_cast<std::uint64_t>(info.st_size);
    if (bytes != geometry_.volume_bytes[i]) {
      return Status::error(
          Code::kIo,
          strf("%s changed its size while it was in use: %llu bytes wanted, "
               "%llu found",
               file(i).c_str(),
               static_cast<unsigned long long>(geometry_.volume_bytes[i]),
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
