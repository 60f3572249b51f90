#include "tests/fuzz/store_target.h"

#include <algorithm>

#include "src/base/check.h"
#include "src/tier/format.h"

namespace zinf::tier {
namespace {

Geometry geometry() {
  Uuid uuid{};
  for (std::size_t i = 0; i < uuid.size(); ++i) uuid[i] = std::byte(i + 1);
  return {uuid, 16 * kUnit, {1000 * kUnit, 500 * kUnit, 64 * kUnit}};
}

VolumeHeader header() {
  return {.uuid = geometry().uuid,
          .index = 0,
          .count = 3,
          .block_bytes = 16 * kUnit,
          .extra_bytes = 65'536,
          .kept = 2,
          .copies = 2};
}

BlobRef blob(std::uint64_t first_unit, std::uint64_t bytes) {
  BlobRef blob;
  blob.bytes = bytes;
  blob.checksum = bytes * 12345;
  std::uint64_t left = (bytes + kUnit - 1) / kUnit;
  while (left > 0) {
    std::uint64_t units = std::min<std::uint64_t>(left, 5);
    blob.pieces.push_back({0, first_unit * kUnit, units * kUnit});
    first_unit += units + 1;
    left -= units;
  }
  return blob;
}

// A page with any content passes its checksum here: else nothing behind it
// would ever be reached.
Page sealed(std::span<const std::byte> data) {
  Page page{};
  std::copy_n(data.begin(), std::min(data.size(), page.size()), page.begin());
  seal(page);
  return page;
}

bool run_volume_header(std::span<const std::byte> data) {
  (void)parse_volume_header(data);
  Result<VolumeHeader> header = parse_volume_header(sealed(data));
  if (!header.ok()) return false;
  Page again;
  encode(*header, again);
  ZINF_CHECK(parse_volume_header(again).ok(), "a header does not survive");
  return true;
}

bool run_superblock(std::span<const std::byte> data) {
  (void)parse_superblock(data, header());
  Result<Superblock> superblock = parse_superblock(sealed(data), header());
  if (!superblock.ok()) return false;
  Page again;
  encode(*superblock, again);
  Result<Superblock> second = parse_superblock(again, header());
  const Capacity& capacity = superblock->capacity;
  ZINF_CHECK(second.ok() && second->sequence == superblock->sequence &&
                 second->capacity.volume_bytes == capacity.volume_bytes &&
                 second->capacity.metadata == capacity.metadata &&
                 second->catalog.pieces == superblock->catalog.pieces,
             "a superblock does not survive");
  return true;
}

bool run_catalog(std::span<const std::byte> data) {
  Result<std::vector<CatalogEntry>> catalog = parse_catalog(data, geometry());
  if (!catalog.ok()) return false;
  Bytes again = encode(*catalog);
  ZINF_CHECK(std::equal(again.begin(), again.end(), data.begin(), data.end()),
             "a catalog does not survive");
  return true;
}

bool run_table(std::span<const std::byte> data) {
  Result<TableRecord> table = parse_table(data, geometry());
  if (!table.ok()) return false;
  Bytes again = encode(*table);
  ZINF_CHECK(std::equal(again.begin(), again.end(), data.begin(), data.end()),
             "a table does not survive");
  return true;
}

std::vector<Bytes> seed_volume_header() {
  Page page;
  encode(header(), page);
  return {Bytes(page.begin(), page.end())};
}

std::vector<Bytes> seed_superblock() {
  std::vector<Bytes> seeds;
  Superblock superblock;
  superblock.uuid = geometry().uuid;
  superblock.next_version = 9;
  Capacity& capacity = superblock.capacity;
  capacity.volume_bytes = geometry().volume_bytes;
  capacity.state_bytes = 123'456;
  capacity.num_states = 7;
  for (std::uint64_t bytes : {0, 100, 70'000}) {
    std::uint64_t begin = 3 + 200 * capacity.metadata.size();
    capacity.metadata.push_back({0, begin * kUnit, 100 * kUnit});
    superblock.sequence = bytes + 1;
    superblock.catalog = blob(20, bytes);
    Page page;
    encode(superblock, page);
    seeds.emplace_back(page.begin(), page.end());
  }
  return seeds;
}

std::vector<Bytes> seed_catalog() {
  std::vector<CatalogEntry> catalog;
  std::vector<Bytes> seeds = {encode(catalog)};
  for (std::uint64_t i = 1; i <= 4; ++i) {
    VersionInfo info;
    info.id = 10 * i;
    info.step = i;
    info.created_ns = 1'700'000'000'000'000'000;
    info.recent = i > 2;
    info.num_states = 3;
    info.bytes = 77;
    for (std::uint64_t n = 0; n + 1 < i; ++n) {
      info.names.push_back("name" + std::to_string(10 * i + n));
    }
    catalog.push_back({info, blob(10 + 100 * i, 5'000 * i)});
    seeds.push_back(encode(catalog));
  }
  return seeds;
}

std::vector<Bytes> seed_table() {
  std::vector<Bytes> seeds;
  TableRecord table{.version = 3, .step = 2, .states = {}};
  seeds.push_back(encode(table));
  for (std::uint32_t i = 0; i < 4; ++i) {
    StateRecord state;
    state.spec = {.unit = "layer." + std::to_string(i),
                  .state = "exp_avg",
                  .dtype = "float32",
                  .shape = std::vector<std::uint64_t>(i, 10),
                  .shard_index = i,
                  .shard_count = 4,
                  .bytes = 50'000 * i};
    state.present = i != 1;
    state.summed = i > 1;
    if (state.present) {
      BlobRef place = blob(100 + 100 * i, state.spec.bytes);
      state.pieces = place.pieces;
      for (Piece& piece : state.pieces) piece.volume = i % 2;
    }
    if (state.summed)
      state.checksums.resize((state.spec.bytes + 65535) / 65536);
    table.states.push_back(state);
    seeds.push_back(encode(table));
  }
  return seeds;
}

}  // namespace

const std::vector<FuzzTarget>& fuzz_targets() {
  static const std::vector<FuzzTarget> targets = {
      {"volume_header", run_volume_header, seed_volume_header},
      {"superblock", run_superblock, seed_superblock},
      {"catalog", run_catalog, seed_catalog},
      {"table", run_table, seed_table}};
  return targets;
}

}  // namespace zinf::tier
