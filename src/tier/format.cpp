#include "src/tier/format.h"

#include <algorithm>
#include <concepts>
#include <cstring>
#include <set>
#include <utility>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"

namespace zinf::tier {
namespace {

using Magic = std::array<char, 8>;
constexpr Magic kVolumeMagic = {'Z', 'I', 'N', 'F', 'V', 'O', 'L', '\n'};
constexpr Magic kSuperMagic = {'Z', 'I', 'N', 'F', 'S', 'U', 'P', '\n'};
constexpr Magic kCatalogMagic = {'Z', 'I', 'N', 'F', 'C', 'A', 'T', '\n'};
constexpr Magic kTableMagic = {'Z', 'I', 'N', 'F', 'T', 'A', 'B', '\n'};

constexpr std::size_t kSealAt = kUnit - 8;
constexpr std::size_t kPieceBytes = 16;
constexpr std::size_t kSuperblockBytes = 88;  // without its lists
static_assert(kSuperblockBytes + kMaxVolumes * 8 +
                  (kMaxRegions + kMaxCatalogPieces) * kPieceBytes <=
              kSealAt);
// The least that an entry takes, to judge counts before allocating.
constexpr std::size_t kLeastVersion = 68;
constexpr std::size_t kLeastState = 32;
constexpr std::uint32_t kRecent = 1;  // flag of a version
constexpr std::uint8_t kPresent = 1;  // flags of a state
constexpr std::uint8_t kSummed = 2;

unsigned long long number(std::uint64_t value) { return value; }

Status corrupt(const std::string& text) {
  return Status::error(Code::kCorrupt, text);
}

// Appends little-endian numbers.
class Writer {
 public:
  template <std::integral T>
  void put(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      out_.push_back(
          static_cast<std::byte>(static_cast<std::uint64_t>(value) >> (8 * i)));
    }
  }
  void put(std::span<const std::byte> bytes) {
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }
  void put(const Magic& magic) { put(std::as_bytes(std::span(magic))); }
  void put(const std::string& text) {
    ZINF_CHECK(text.size() <= kMaxName, "a name of %zu bytes", text.size());
    put(static_cast<std::uint16_t>(text.size()));
    put(std::as_bytes(std::span(text)));
  }
  void put(const std::vector<Piece>& pieces) {
    put(static_cast<std::uint32_t>(pieces.size()));
    for (const Piece& piece : pieces) put_piece(piece);
  }
  void put_piece(const Piece& piece) {
    put(piece.volume);
    put(static_cast<std::uint32_t>(piece.bytes / kUnit));
    put(piece.offset);
  }

  std::vector<std::byte> take() { return std::move(out_); }
  void fill(Page& page) const {
    ZINF_CHECK(out_.size() <= kSealAt, "a page of %zu bytes", out_.size());
    page.fill(std::byte{0});
    std::copy(out_.begin(), out_.end(), page.begin());
    seal(page);
  }

 private:
  std::vector<std::byte> out_;
};

// Reads little-endian numbers; after the end everything is zero and failed()
// is true.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}

  template <std::integral T>
  T get() {
    std::span<const std::byte> bytes = take(sizeof(T));
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      value |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
    }
    return static_cast<T>(value);
  }
  std::uint8_t u8() { return get<std::uint8_t>(); }
  std::uint16_t u16() { return get<std::uint16_t>(); }
  std::uint32_t u32() { return get<std::uint32_t>(); }
  std::uint64_t u64() { return get<std::uint64_t>(); }

  std::string text() {
    std::size_t size = u16();
    if (size > kMaxName) failed_ = true;
    std::span<const std::byte> bytes = take(size);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  Uuid uuid() {
    Uuid uuid{};
    std::span<const std::byte> bytes = take(uuid.size());
    std::copy(bytes.begin(), bytes.end(), uuid.begin());
    return uuid;
  }
  // Whether `count` things of at least `least` bytes can still follow.
  bool has(std::uint64_t count, std::size_t least) {
    if (count > left() / least) failed_ = true;
    return !failed_;
  }

  std::size_t left() const { return in_.size(); }
  bool failed() const { return failed_; }

 private:
  std::span<const std::byte> take(std::size_t bytes) {
    if (failed_ || bytes > in_.size()) {
      failed_ = true;
      return {};
    }
    std::span<const std::byte> taken = in_.first(bytes);
    in_ = in_.subspan(bytes);
    return taken;
  }

  std::span<const std::byte> in_;
  bool failed_ = false;
};

Status check_start(Reader& reader, const Magic& magic, const char* what) {
  Magic got{};
  for (char& byte : got) byte = reader.get<char>();
  if (got != magic) return corrupt(strf("this is not a %s", what));
  auto version = reader.u32();
  if (version != kFormatVersion) {
    return Status::error(Code::kUnsupported,
                         strf("a %s of format %u; this program knows %u", what,
                              version, kFormatVersion));
  }
  return {};
}

Status check_page(std::span<const std::byte> page, const char* what) {
  if (page.size() != kUnit) return corrupt(strf("a short %s", what));
  Reader end(page.subspan(kSealAt));
  std::uint64_t wanted = end.u64();
  std::uint64_t got = checksum(page.first(kSealAt));
  if (wanted == got) return {};
  return corrupt(strf("the checksum of the %s: wanted %016llx, got %016llx",
                      what, number(wanted), number(got)));
}

Status check_piece(const Piece& piece, const Geometry& geometry) {
  if (piece.volume >= geometry.volume_bytes.size()) {
    return corrupt(strf("a piece in volume %u of %zu", piece.volume,
                        geometry.volume_bytes.size()));
  }
  std::uint64_t size = geometry.volume_bytes[piece.volume];
  bool inside = piece.offset >= kDataBegin && piece.offset <= size &&
                piece.bytes <= size - piece.offset;
  if (piece.bytes > 0 && inside &&
      is_aligned(piece.offset, std::uint64_t{kUnit}))
    return {};
  return corrupt(strf(
      "a piece of %llu bytes at %llu of volume %u, which has "
      "%llu",
      number(piece.bytes), number(piece.offset), piece.volume, number(size)));
}

Piece read_piece(Reader& reader) {
  Piece piece;
  piece.volume = reader.u32();
  piece.bytes = std::uint64_t{reader.u32()} * kUnit;
  piece.offset = reader.u64();
  return piece;
}

// `count` pieces that hold exactly align_up(bytes).
Result<std::vector<Piece>> parse_pieces(Reader& reader, std::uint64_t count,
                                        std::uint64_t bytes,
                                        const Geometry& geometry) {
  if (!reader.has(count, kPieceBytes)) return corrupt("a cut list of pieces");
  std::vector<Piece> pieces(static_cast<std::size_t>(count));
  std::uint64_t total = 0;  // cannot wrap: each piece lies in a volume
  for (Piece& piece : pieces) {
    piece = read_piece(reader);
    ZINF_TRY(check_piece(piece, geometry));
    total += piece.bytes;
    if (total - piece.bytes > total) return corrupt("pieces beyond 64 bits");
  }
  bool fits = bytes <= total && total - bytes < kUnit;
  if (!fits) {
    return corrupt(
        strf("%llu bytes in pieces of %llu", number(bytes), number(total)));
  }
  return pieces;
}

Result<BlobRef> parse_blob_ref(Reader& reader, const Geometry& geometry) {
  BlobRef blob;
  blob.bytes = reader.u64();
  blob.checksum = reader.u64();
  auto count = reader.u32();
  ZINF_ASSIGN(blob.pieces, parse_pieces(reader, count, blob.bytes, geometry));
  for (const Piece& piece : blob.pieces) {
    if (piece.volume != 0) return corrupt("metadata outside volume 0");
  }
  return blob;
}

Result<Capacity> parse_capacity(Reader& reader, const VolumeHeader& header) {
  Capacity capacity;
  capacity.state_bytes = reader.u64();
  capacity.num_states = reader.u64();
  auto num_volumes = reader.u32();
  if (num_volumes != header.count) {
    return corrupt(strf("the superblock knows %u volumes of %u", num_volumes,
                        header.count));
  }
  capacity.volume_bytes.resize(num_volumes);
  for (std::uint64_t& bytes : capacity.volume_bytes) {
    bytes = reader.u64();
    bool good = bytes >= kDataBegin && bytes <= std::uint64_t{INT64_MAX} &&
                is_aligned(bytes, std::uint64_t{kUnit});
    if (!good) return corrupt(strf("a volume of %llu bytes", number(bytes)));
  }
  auto num_regions = reader.u32();
  if (num_regions > kMaxRegions) return corrupt("too many metadata regions");
  Geometry geometry{header.uuid, header.block_bytes, capacity.volume_bytes};
  std::uint64_t end = kDataBegin;
  for (std::uint32_t i = 0; i < num_regions; ++i) {
    Piece region = read_piece(reader);
    ZINF_TRY(check_piece(region, geometry));
    if (region.volume != 0 || region.offset < end) {
      return corrupt("a metadata region out of order");
    }
    end = region.end();
    capacity.metadata.push_back(region);
  }
  return capacity;
}

Status check_overlap(std::vector<Piece> pieces) {
  std::sort(pieces.begin(), pieces.end());
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    const Piece& before = pieces[i - 1];
    if (before.volume != pieces[i].volume || before.end() <= pieces[i].offset) {
      continue;
    }
    return corrupt(strf("two pieces overlap at %llu of volume %u",
                        number(pieces[i].offset), pieces[i].volume));
  }
  return {};
}

Result<StateRecord> parse_state(Reader& reader, const Geometry& geometry) {
  StateRecord record;
  StateSpec& spec = record.spec;
  spec.unit = reader.text();
  spec.state = reader.text();
  spec.dtype = reader.text();
  auto flags = reader.u8();
  record.present = (flags & kPresent) != 0;
  record.summed = (flags & kSummed) != 0;
  spec.shape.resize(reader.u8());
  for (std::uint64_t& extent : spec.shape) extent = reader.u64();
  spec.shard_index = reader.u32();
  spec.shard_count = reader.u32();
  spec.bytes = reader.u64();
  auto num_pieces = reader.u32();
  auto num_checksums = reader.u32();
  if (reader.failed()) return corrupt("a cut state");
  Status bad = corrupt("state " + spec.name() + " makes no sense");
  if (flags > (kPresent | kSummed) || spec.shard_index >= spec.shard_count) {
    return bad;
  }
  if (!record.present) {
    if (record.summed || num_pieces != 0 || num_checksums != 0) return bad;
    return record;
  }
  std::uint64_t blocks = spec.bytes / geometry.block_bytes +
                         (spec.bytes % geometry.block_bytes != 0 ? 1 : 0);
  if (num_checksums != (record.summed ? blocks : 0)) return bad;
  ZINF_ASSIGN(record.pieces,
              parse_pieces(reader, num_pieces, spec.bytes, geometry));
  if (!reader.has(num_checksums, 8)) return corrupt("a cut state");
  record.checksums.resize(num_checksums);
  for (std::uint64_t& sum : record.checksums) sum = reader.u64();
  return record;
}

Result<CatalogEntry> parse_entry(Reader& reader, const Geometry& geometry) {
  CatalogEntry entry;
  entry.info.id = reader.u64();
  entry.info.step = reader.u64();
  entry.info.created_ns = reader.get<std::int64_t>();
  auto flags = reader.u32();
  entry.info.recent = (flags & kRecent) != 0;
  entry.info.num_states = reader.u64();
  entry.info.bytes = reader.u64();
  auto num_names = reader.u32();
  if (flags > kRecent || !reader.has(num_names, 2)) {
    return corrupt("a version that makes no sense");
  }
  for (std::uint32_t i = 0; i < num_names; ++i) {
    entry.info.names.push_back(reader.text());
  }
  ZINF_ASSIGN(entry.table, parse_blob_ref(reader, geometry));
  if (entry.table.bytes == 0) return corrupt("a version without a table");
  return entry;
}

}  // namespace

std::string uuid_text(const Uuid& uuid) {
  std::string text;
  for (std::byte byte : uuid) text += strf("%02x", static_cast<unsigned>(byte));
  return text;
}

void seal(Page& page) {
  std::uint64_t sum = checksum(std::span(page).first(kSealAt));
  for (std::size_t i = 0; i < 8; ++i) {
    page[kSealAt + i] = static_cast<std::byte>(sum >> (8 * i));
  }
}

void encode(const VolumeHeader& header, Page& page) {
  Writer writer;
  writer.put(kVolumeMagic);
  writer.put(kFormatVersion);
  writer.put(header.index);
  writer.put(header.uuid);
  writer.put(header.count);
  writer.put(header.kept);
  writer.put(header.block_bytes);
  writer.put(header.extra_bytes);
  writer.put(header.copies);
  writer.fill(page);
}

void encode(const Superblock& superblock, Page& page) {
  Writer writer;
  writer.put(kSuperMagic);
  writer.put(kFormatVersion);
  writer.put(superblock.uuid);
  writer.put(superblock.sequence);
  writer.put(superblock.next_version);
  const Capacity& capacity = superblock.capacity;
  writer.put(capacity.state_bytes);
  writer.put(capacity.num_states);
  writer.put(static_cast<std::uint32_t>(capacity.volume_bytes.size()));
  for (std::uint64_t bytes : capacity.volume_bytes) writer.put(bytes);
  writer.put(capacity.metadata);
  writer.put(superblock.catalog.bytes);
  writer.put(superblock.catalog.checksum);
  writer.put(superblock.catalog.pieces);
  writer.fill(page);
}

std::vector<std::byte> encode(const std::vector<CatalogEntry>& catalog) {
  Writer writer;
  writer.put(kCatalogMagic);
  writer.put(kFormatVersion);
  writer.put(static_cast<std::uint32_t>(catalog.size()));
  for (const CatalogEntry& entry : catalog) {
    writer.put(entry.info.id);
    writer.put(entry.info.step);
    writer.put(entry.info.created_ns);
    writer.put(entry.info.recent ? kRecent : std::uint32_t{0});
    writer.put(entry.info.num_states);
    writer.put(entry.info.bytes);
    writer.put(static_cast<std::uint32_t>(entry.info.names.size()));
    for (const std::string& name : entry.info.names) writer.put(name);
    writer.put(entry.table.bytes);
    writer.put(entry.table.checksum);
    writer.put(entry.table.pieces);
  }
  return writer.take();
}

std::vector<std::byte> encode(const TableRecord& table) {
  Writer writer;
  writer.put(kTableMagic);
  writer.put(kFormatVersion);
  writer.put(static_cast<std::uint32_t>(table.states.size()));
  writer.put(table.version);
  writer.put(table.step);
  for (const StateRecord& record : table.states) {
    const StateSpec& spec = record.spec;
    writer.put(spec.unit);
    writer.put(spec.state);
    writer.put(spec.dtype);
    writer.put(static_cast<std::uint8_t>((record.present ? kPresent : 0) |
                                         (record.summed ? kSummed : 0)));
    ZINF_CHECK(spec.shape.size() < 256, "%zu dimensions", spec.shape.size());
    writer.put(static_cast<std::uint8_t>(spec.shape.size()));
    for (std::uint64_t extent : spec.shape) writer.put(extent);
    writer.put(spec.shard_index);
    writer.put(spec.shard_count);
    writer.put(spec.bytes);
    writer.put(static_cast<std::uint32_t>(record.pieces.size()));
    writer.put(static_cast<std::uint32_t>(record.checksums.size()));
    for (const Piece& piece : record.pieces) writer.put_piece(piece);
    for (std::uint64_t sum : record.checksums) writer.put(sum);
  }
  return writer.take();
}

Result<VolumeHeader> parse_volume_header(std::span<const std::byte> page) {
  constexpr const char* kWhat = "volume header";
  Reader reader(page);
  ZINF_TRY(check_start(reader, kVolumeMagic, kWhat));
  ZINF_TRY(check_page(page, kWhat));
  VolumeHeader header;
  header.index = reader.u32();
  header.uuid = reader.uuid();
  header.count = reader.u32();
  header.kept = reader.u32();
  header.block_bytes = reader.u64();
  header.extra_bytes = reader.u64();
  header.copies = reader.u32();
  bool good = header.count > 0 && header.count <= kMaxVolumes &&
              header.index < header.count && header.block_bytes >= kUnit &&
              header.block_bytes <= kGiB &&
              is_aligned(header.block_bytes, std::uint64_t{kUnit}) &&
              header.copies <= 2;
  if (!good) return corrupt("the volume header makes no sense");
  return header;
}

Result<Superblock> parse_superblock(std::span<const std::byte> page,
                                    const VolumeHeader& header) {
  constexpr const char* kWhat = "superblock";
  Reader reader(page);
  ZINF_TRY(check_start(reader, kSuperMagic, kWhat));
  ZINF_TRY(check_page(page, kWhat));
  Superblock superblock;
  superblock.uuid = reader.uuid();
  superblock.sequence = reader.u64();
  superblock.next_version = reader.u64();
  if (superblock.uuid != header.uuid) {
    return corrupt("the superblock belongs to store " +
                   uuid_text(superblock.uuid));
  }
  ZINF_ASSIGN(superblock.capacity, parse_capacity(reader, header));
  Geometry geometry{header.uuid, header.block_bytes,
                    superblock.capacity.volume_bytes};
  ZINF_ASSIGN(superblock.catalog, parse_blob_ref(reader, geometry));
  if (superblock.catalog.pieces.size() > kMaxCatalogPieces) {
    return corrupt("a catalog in too many pieces");
  }
  ZINF_TRY(check_overlap(superblock.catalog.pieces));
  return superblock;
}

Result<std::vector<CatalogEntry>> parse_catalog(std::span<const std::byte> blob,
                                                const Geometry& geometry) {
  Reader reader(blob);
  ZINF_TRY(check_start(reader, kCatalogMagic, "catalog"));
  auto count = reader.u32();
  if (!reader.has(count, kLeastVersion)) return corrupt("a cut catalog");
  std::vector<CatalogEntry> catalog;
  std::vector<Piece> pieces;
  std::set<std::string> names;
  for (std::uint32_t i = 0; i < count; ++i) {
    ZINF_ASSIGN(CatalogEntry entry, parse_entry(reader, geometry));
    if (!catalog.empty() && entry.info.id <= catalog.back().info.id) {
      return corrupt("versions out of order");
    }
    for (const std::string& name : entry.info.names) {
      if (!names.insert(name).second) return corrupt("a name used twice");
    }
    pieces.insert(pieces.end(), entry.table.pieces.begin(),
                  entry.table.pieces.end());
    catalog.push_back(std::move(entry));
  }
  if (reader.failed() || reader.left() > 0) return corrupt("a cut catalog");
  ZINF_TRY(check_overlap(std::move(pieces)));
  return catalog;
}

Result<TableRecord> parse_table(std::span<const std::byte> blob,
                                const Geometry& geometry) {
  Reader reader(blob);
  ZINF_TRY(check_start(reader, kTableMagic, "table"));
  auto count = reader.u32();
  TableRecord table;
  table.version = reader.u64();
  table.step = reader.u64();
  if (!reader.has(count, kLeastState)) return corrupt("a cut table");
  std::vector<Piece> pieces;
  std::set<std::pair<std::string, std::string>> names;
  for (std::uint32_t i = 0; i < count; ++i) {
    ZINF_ASSIGN(StateRecord record, parse_state(reader, geometry));
    if (!names.insert({record.spec.unit, record.spec.state}).second) {
      return corrupt("state " + record.spec.name() + " is there twice");
    }
    pieces.insert(pieces.end(), record.pieces.begin(), record.pieces.end());
    table.states.push_back(std::move(record));
  }
  if (reader.failed() || reader.left() > 0) return corrupt("a cut table");
  ZINF_TRY(check_overlap(std::move(pieces)));
  return table;
}

}  // namespace zinf::tier
