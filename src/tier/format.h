// The bytes on the disk: docs/formats/store.md. Pure functions.
//
// parse_* take bytes from a disk and trust nothing: every count is checked
// against the bytes that are there before anything is allocated for it, every
// piece against the volumes. What they return can be used without more checks.
// kCorrupt: it makes no sense; kUnsupported: another format version.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/tier/checksum.h"
#include "zinf/status.h"
#include "zinf/store.h"

namespace zinf::tier {

inline constexpr std::uint32_t kFormatVersion = 1;
inline constexpr std::size_t kUnit = 4096;  // everything is a multiple of it
inline constexpr std::uint64_t kSuperblocks = kUnit;  // two, of volume 0
inline constexpr std::uint64_t kDataBegin = 3 * kUnit;
// A superblock with the most of all of these still fits its page.
inline constexpr std::size_t kMaxCatalogPieces = 96;
inline constexpr std::size_t kMaxRegions = 24;
inline constexpr std::size_t kMaxName = 4096;
inline constexpr std::uint32_t kMaxVolumes = 256;

using Page = std::array<std::byte, kUnit>;
using Uuid = std::array<std::byte, 16>;
std::string uuid_text(const Uuid& uuid);

// A contiguous range of a volume; offset and bytes are multiples of kUnit.
struct Piece {
  std::uint32_t volume = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  std::uint64_t end() const { return offset + bytes; }
  auto operator<=>(const Piece&) const = default;
};

struct VolumeHeader {
  Uuid uuid{};
  std::uint32_t index = 0;
  std::uint32_t count = 0;
  std::uint64_t block_bytes = 0;
  std::uint64_t extra_bytes = 0;  // what the store was made for
  std::uint32_t kept = 0;
  std::uint32_t copies = 0;  // Durability::copies()
};

// What the store has room for. Grows, as atomically as a commit.
struct Capacity {
  std::vector<std::uint64_t> volume_bytes;
  std::vector<Piece> metadata;  // regions set aside in volume 0, ascending
  std::uint64_t state_bytes = 0;
  std::uint64_t num_states = 0;
};

// What a piece can be checked against.
struct Geometry {
  Uuid uuid{};
  std::uint64_t block_bytes = 0;
  std::vector<std::uint64_t> volume_bytes;
};

// A checksummed run of bytes in volume 0.
struct BlobRef {
  std::vector<Piece> pieces;
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
};

struct Superblock {
  Uuid uuid{};
  std::uint64_t sequence = 0;
  std::uint64_t next_version = 1;
  Capacity capacity;
  BlobRef catalog;  // without bytes in a store that has no version
};

struct CatalogEntry {
  VersionInfo info;
  BlobRef table;
};

struct StateRecord {
  StateSpec spec;
  bool present = false;  // has content
  bool summed = false;   // has checksums, one per block
  std::vector<Piece> pieces;
  std::vector<std::uint64_t> checksums;
};

struct TableRecord {
  std::uint64_t version = 0;
  std::uint64_t step = 0;
  std::vector<StateRecord> states;
};

void encode(const VolumeHeader& header, Page& page);
void encode(const Superblock& superblock, Page& page);
std::vector<std::byte> encode(const std::vector<CatalogEntry>& catalog);
std::vector<std::byte> encode(const TableRecord& table);

// Puts the right checksum at a page's end (encode() has done it already).
void seal(Page& page);

Result<VolumeHeader> parse_volume_header(std::span<const std::byte> page);
// The header says which store it must be of, and how many volumes that has.
Result<Superblock> parse_superblock(std::span<const std::byte> page,
                                    const VolumeHeader& header);
// The blob's own checksum has been compared by whoever read it.
Result<std::vector<CatalogEntry>> parse_catalog(std::span<const std::byte> blob,
                                                const Geometry& geometry);
Result<TableRecord> parse_table(std::span<const std::byte> blob,
                                const Geometry& geometry);

}  // namespace zinf::tier
