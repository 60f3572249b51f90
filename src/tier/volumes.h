// The open volumes of a store: one file and one Io per path, so that a slow
// path never takes the places of the others.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/io/scratch.h"
#include "src/tier/format.h"
#include "src/tier/run_directory.h"
#include "zinf/io.h"
#include "zinf/store.h"

namespace zinf::tier {

// Page-aligned memory of whole pages.
class PageBuffer {
 public:
  explicit PageBuffer(std::size_t bytes);  // rounded up to pages, zeroed
  std::span<std::byte> span() { return {data_.get(), bytes_}; }
  std::span<const std::byte> span() const { return {data_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// Thread-safe after creation.
class Volumes {
 public:
  // Makes directories, files, headers and the first superblock; on failure
  // nothing is left behind.
  static Result<std::shared_ptr<Volumes>> create(const StoreOptions& options);
  static Result<std::shared_ptr<Volumes>> open(const StoreOptions& options);
  ~Volumes();

  const VolumeHeader& header() const { return header_; }  // of volume 0
  std::size_t count() const { return volumes_.size(); }
  const std::string& directory(std::size_t volume) const {
    return volumes_[volume].directory;
  }
  // For messages; of a file without a name a description.
  std::string file(std::size_t volume) const;
  const std::vector<double>& weights() const { return weights_; }

  // Part of a piece: `into` or `from` is where `skip` bytes into it are.
  io::Request read(const Piece& piece, std::uint64_t skip,
                   std::span<std::byte> into);
  io::Request write(const Piece& piece, std::uint64_t skip,
                    std::span<const std::byte> from);
  Status sync(std::size_t volume);
  Status sync_all();

  Status read_page(std::uint64_t offset, Page& page);  // of volume 0
  Status write_page(std::uint64_t offset, const Page& page);
  Result<std::vector<std::byte>> read_blob(const BlobRef& blob,
                                           const std::string& what);
  Status write_blob(const std::vector<Piece>& pieces,
                    std::span<const std::byte> blob);

  // `now`, grown so that it has room for so much in all; kNoSpace with what
  // each path needs and has.
  Result<Capacity> grown(const Capacity& now, std::uint64_t state_bytes,
                         std::uint64_t num_states) const;
  // Gives the files these sizes, reserved on the disks but not synced; on
  // failure some may have them: see cut().
  Status extend(const Capacity& to);
  // Gives back what the files have beyond these sizes.
  void cut(const Capacity& to);

  // Whether every file has its full size. It may have more: a crash leaves what
  // an unfinished extend() has got, and the next one takes it.
  Status check_sizes(const Capacity& capacity) const;
  // The same, and whether it is still the one that was opened.
  Status check_files(const Capacity& capacity) const;

  std::vector<io::Registration> register_memory(std::span<std::byte> memory);
  std::vector<io::Stats> stats() const;  // by volume

  // See Store::link().
  Status link(const std::string& path);

  // That create() has made. Nothing else is called afterwards.
  void remove_files();

 private:
  struct Volume {
    std::string directory;
    RunDirectory run;                     // of Files::kNamed
    std::optional<io::Scratch> nameless;  // else
    bool made_file = false;
    std::unique_ptr<io::Io> io;
    io::File file;
    std::uint64_t inode = 0;
    std::uint64_t limit_bytes = 0;
    double weight = 0;
  };

  explicit Volumes(const StoreOptions& options);

  Status make_io(const StoreOptions& options, const StorePath& path,
                 Volume& volume);
  Status make_files(const StoreOptions& options);
  Status make_directory(Volume& volume);
  Status make_file(Volume& volume, std::uint64_t bytes);
  Status open_files(const StoreOptions& options);
  Status open_headers(std::vector<VolumeHeader>& headers, Access access);
  Status sort_by(const std::vector<VolumeHeader>& headers);
  Status write_headers(const StoreOptions& options, const Capacity& capacity);
  Result<std::vector<std::uint64_t>> find_room() const;
  Result<std::vector<std::uint64_t>> share_out(
      const std::vector<std::uint64_t>& now,
      const std::vector<std::uint64_t>& least, std::uint64_t more) const;
  Status measure(const StoreOptions& options);
  Status note_inodes();

  const bool on_disk_;
  const Files files_;
  const char* const advice_;  // for whom a disk is too small
  std::vector<Volume> volumes_;
  VolumeHeader header_;
  std::vector<double> weights_;
};

// What is set aside for tables and catalogs.
std::uint64_t metadata_bytes_for(const StoreOptions& options);

}  // namespace zinf::tier
