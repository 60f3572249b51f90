// The bytes of docs/formats/store.md, and what the readers refuse.
#include "src/tier/format.h"

#include <gtest/gtest.h>

#include <functional>

namespace zinf::tier {
namespace {

Geometry geometry() {
  Geometry geometry{{}, 4 * kUnit, {100 * kUnit, 50 * kUnit}};
  geometry.uuid.fill(std::byte{0xab});
  return geometry;
}

VolumeHeader header() {
  return {.uuid = geometry().uuid,
          .index = 1,
          .count = 2,
          .block_bytes = 4 * kUnit,
          .extra_bytes = 678,
          .kept = 3,
          .copies = 2};
}

Superblock superblock() {
  return {.uuid = geometry().uuid,
          .sequence = 42,
          .next_version = 8,
          .capacity = {.volume_bytes = geometry().volume_bytes,
                       .metadata = {{0, 3 * kUnit, 7 * kUnit}},
                       .state_bytes = 1234,
                       .num_states = 5},
          .catalog = {{{0, 5 * kUnit, 2 * kUnit}}, 5000, 77}};
}

template <typename T>
T at(std::span<const std::byte> bytes, std::size_t offset) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value |= static_cast<std::uint64_t>(bytes[offset + i]) << (8 * i);
  }
  return static_cast<T>(value);
}

std::string text(std::span<const std::byte> bytes, std::size_t offset,
                 std::size_t size) {
  return {reinterpret_cast<const char*>(bytes.data()) + offset, size};
}

// The offsets are the document's, written out: a change of the code alone is a
// change of the format.
TEST(Checksum, IsTheSameWithAndWithoutAvx2) {
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "no AVX2 here";
  std::vector<std::byte> data(100'000);
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<std::byte>(i * i % 251);
  }
  for (std::size_t bytes = 0; bytes <= data.size(); bytes += 1 + bytes / 7) {
    auto part = std::span(data).first(bytes);
    ASSERT_EQ(detail::checksum_avx2(part), detail::checksum_plain(part))
        << bytes;
  }
}

TEST(Format, PagesAreAsDocumented) {
  Page page;
  encode(header(), page);
  EXPECT_EQ(text(page, 0, 8), "ZINFVOL\n");
  EXPECT_EQ(at<std::uint32_t>(page, 8), 1u);
  EXPECT_EQ(at<std::uint32_t>(page, 12), 1u);
  EXPECT_EQ(page[16], std::byte{0xab});
  EXPECT_EQ(at<std::uint32_t>(page, 32), 2u);
  EXPECT_EQ(at<std::uint32_t>(page, 36), 3u);
  EXPECT_EQ(at<std::uint64_t>(page, 40), 4 * kUnit);
  EXPECT_EQ(at<std::uint64_t>(page, 48), 678u);
  EXPECT_EQ(at<std::uint32_t>(page, 56), 2u);
  EXPECT_EQ(at<std::uint64_t>(page, 4088),
            checksum(std::span(page).first(4088)));

  encode(superblock(), page);
  EXPECT_EQ(text(page, 0, 8), "ZINFSUP\n");
  EXPECT_EQ(page[12], std::byte{0xab});
  EXPECT_EQ(at<std::uint64_t>(page, 28), 42u);
  EXPECT_EQ(at<std::uint64_t>(page, 36), 8u);
  EXPECT_EQ(at<std::uint64_t>(page, 44), 1234u);
  EXPECT_EQ(at<std::uint64_t>(page, 52), 5u);
  EXPECT_EQ(at<std::uint32_t>(page, 60), 2u);
  EXPECT_EQ(at<std::uint64_t>(page, 64), 100 * kUnit);
  EXPECT_EQ(at<std::uint64_t>(page, 72), 50 * kUnit);
  EXPECT_EQ(at<std::uint32_t>(page, 80), 1u);
  EXPECT_EQ(at<std::uint32_t>(page, 84), 0u);
  EXPECT_EQ(at<std::uint32_t>(page, 88), 7u);
  EXPECT_EQ(at<std::uint64_t>(page, 92), 3 * kUnit);
  EXPECT_EQ(at<std::uint64_t>(page, 100), 5000u);
  EXPECT_EQ(at<std::uint64_t>(page, 108), 77u);
  EXPECT_EQ(at<std::uint32_t>(page, 116), 1u);
  EXPECT_EQ(at<std::uint32_t>(page, 120), 0u);
  EXPECT_EQ(at<std::uint32_t>(page, 124), 2u);
  EXPECT_EQ(at<std::uint64_t>(page, 128), 5 * kUnit);
  EXPECT_EQ(at<std::uint64_t>(page, 4088),
            checksum(std::span(page).first(4088)));
  // XXH3-64 itself: the value of nothing.
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2u);
}

TableRecord table() {
  StateRecord state;
  state.spec = {.unit = "fc",
                .state = "master",
                .dtype = "float32",
                .shape = {3, 4},
                .shard_index = 1,
                .shard_count = 2,
                .bytes = 20'000};
  state.present = true;
  state.summed = true;
  state.pieces = {{0, 10 * kUnit, 3 * kUnit}, {1, 10 * kUnit, 2 * kUnit}};
  state.checksums = {11, 12};
  return {.version = 7, .step = 6, .states = {state}};
}

TEST(Format, ATableIsAsDocumented) {
  std::vector<std::byte> blob = encode(table());
  EXPECT_EQ(text(blob, 0, 8), "ZINFTAB\n");
  EXPECT_EQ(at<std::uint32_t>(blob, 8), 1u);
  EXPECT_EQ(at<std::uint32_t>(blob, 12), 1u);
  EXPECT_EQ(at<std::uint64_t>(blob, 16), 7u);
  EXPECT_EQ(at<std::uint64_t>(blob, 24), 6u);
  EXPECT_EQ(at<std::uint16_t>(blob, 32), 2u);
  EXPECT_EQ(text(blob, 34, 2), "fc");
  EXPECT_EQ(text(blob, 38, 6), "master");
  EXPECT_EQ(text(blob, 46, 7), "float32");
  EXPECT_EQ(at<std::uint8_t>(blob, 53), 3u);
  EXPECT_EQ(at<std::uint8_t>(blob, 54), 2u);
  EXPECT_EQ(at<std::uint64_t>(blob, 55), 3u);
  EXPECT_EQ(at<std::uint64_t>(blob, 63), 4u);
  EXPECT_EQ(at<std::uint32_t>(blob, 71), 1u);
  EXPECT_EQ(at<std::uint32_t>(blob, 75), 2u);
  EXPECT_EQ(at<std::uint64_t>(blob, 79), 20'000u);
  EXPECT_EQ(at<std::uint32_t>(blob, 87), 2u);
  EXPECT_EQ(at<std::uint32_t>(blob, 91), 2u);
  EXPECT_EQ(at<std::uint64_t>(blob, 103), 10 * kUnit);
  EXPECT_EQ(at<std::uint64_t>(blob, 127), 11u);
  EXPECT_EQ(blob.size(), 143u);
  Result<TableRecord> back = parse_table(blob, geometry());
  ASSERT_TRUE(back.ok()) << back.status().text();
  EXPECT_EQ(back->states[0].spec, table().states[0].spec);
  EXPECT_EQ(back->states[0].pieces, table().states[0].pieces);
}

TEST(Format, ATableThatMakesNoSenseIsRefused) {
  using Change = std::function<void(StateRecord&)>;
  std::vector<std::pair<const char*, Change>> changes = {
      {"no such volume", [](StateRecord& s) { s.pieces[1].volume = 2; }},
      {"beyond the end",
       [](StateRecord& s) { s.pieces[1].offset = 49 * kUnit; }},
      {"in the header", [](StateRecord& s) { s.pieces[1].offset = 2 * kUnit; }},
      {"not aligned", [](StateRecord& s) { s.pieces[1].offset += 512; }},
      {"overlap",
       [](StateRecord& s) { s.pieces[1] = {0, 12 * kUnit, 2 * kUnit}; }},
      {"too few bytes", [](StateRecord& s) { s.spec.bytes = 30'000; }},
      {"too many bytes", [](StateRecord& s) { s.spec.bytes = 10'000; }},
      {"no bytes", [](StateRecord& s) { s.pieces[0].bytes = 0; }},
      {"a checksum short", [](StateRecord& s) { s.checksums.pop_back(); }},
      {"content from nowhere", [](StateRecord& s) { s.present = false; }},
      {"shard", [](StateRecord& s) { s.spec.shard_index = 2; }},
  };
  for (auto& [what, change] : changes) {
    TableRecord record = table();
    change(record.states[0]);
    EXPECT_EQ(parse_table(encode(record), geometry()).status().code(),
              Code::kCorrupt)
        << what;
  }
  TableRecord twice = table();
  twice.states.push_back(twice.states[0]);
  for (Piece& piece : twice.states[1].pieces) piece.offset += 10 * kUnit;
  EXPECT_EQ(parse_table(encode(twice), geometry()).status().code(),
            Code::kCorrupt);
}

TEST(Format, ASuperblockThatMakesNoSenseIsRefused) {
  using Change = std::function<void(Superblock&)>;
  std::vector<std::pair<const char*, Change>> changes = {
      {"a volume short",
       [](Superblock& s) { s.capacity.volume_bytes.pop_back(); }},
      {"a volume more",
       [](Superblock& s) { s.capacity.volume_bytes.push_back(50 * kUnit); }},
      {"a volume without room",
       [](Superblock& s) { s.capacity.volume_bytes[1] = 2 * kUnit; }},
      {"not aligned", [](Superblock& s) { s.capacity.volume_bytes[1] += 512; }},
      {"beyond any disk",
       [](Superblock& s) { s.capacity.volume_bytes[1] = ~4095ull; }},
      {"a region in volume 1",
       [](Superblock& s) { s.capacity.metadata[0].volume = 1; }},
      {"a region beyond the end",
       [](Superblock& s) { s.capacity.metadata[0].offset = 99 * kUnit; }},
      {"an empty region",
       [](Superblock& s) { s.capacity.metadata[0].bytes = 0; }},
      {"regions that overlap",
       [](Superblock& s) {
         s.capacity.metadata.push_back({0, 9 * kUnit, kUnit});
       }},
      {"too many regions",
       [](Superblock& s) {
         for (std::size_t i = 0; i < kMaxRegions; ++i) {
           s.capacity.metadata.push_back({0, (20 + i) * kUnit, kUnit});
         }
       }},
      {"a catalog beyond the end",
       [](Superblock& s) { s.catalog.pieces[0].offset = 99 * kUnit; }},
  };
  for (auto& [what, change] : changes) {
    Superblock changed = superblock();
    change(changed);
    Page page;
    encode(changed, page);
    EXPECT_EQ(parse_superblock(page, header()).status().code(), Code::kCorrupt)
        << what;
  }
}

TEST(Format, TheLargestSuperblockFitsItsPage) {
  Superblock large = superblock();
  large.capacity = {};
  large.catalog = {};
  for (std::size_t i = 0; i < kMaxVolumes; ++i) {
    large.capacity.volume_bytes.push_back(1000 * kUnit);
  }
  for (std::size_t i = 0; i < kMaxRegions; ++i) {
    large.capacity.metadata.push_back({0, (10 + 2 * i) * kUnit, kUnit});
  }
  for (std::size_t i = 0; i < kMaxCatalogPieces; ++i) {
    large.catalog.pieces.push_back({0, (100 + 2 * i) * kUnit, kUnit});
    large.catalog.bytes += kUnit;
  }
  Page page;
  encode(large, page);
  VolumeHeader wide = header();
  wide.count = kMaxVolumes;
  Result<Superblock> back = parse_superblock(page, wide);
  ASSERT_TRUE(back.ok()) << back.status().text();
  EXPECT_EQ(back->capacity.volume_bytes, large.capacity.volume_bytes);
  EXPECT_EQ(back->capacity.metadata, large.capacity.metadata);
  EXPECT_EQ(back->catalog.pieces, large.catalog.pieces);
}

TEST(Format, EveryCutAndEveryOtherVersionIsRefused) {
  std::vector<std::byte> blob = encode(table());
  for (std::size_t size = 0; size < blob.size(); ++size) {
    EXPECT_FALSE(parse_table(std::span(blob).first(size), geometry()).ok());
  }
  blob.push_back(std::byte{0});
  EXPECT_FALSE(parse_table(blob, geometry()).ok());
  blob.pop_back();
  blob[8] = std::byte{9};
  EXPECT_EQ(parse_table(blob, geometry()).status().code(), Code::kUnsupported);

  Page page;
  encode(superblock(), page);
  ASSERT_TRUE(parse_superblock(page, header()).ok());
  for (std::size_t i = 0; i < page.size(); ++i) {
    page[i] ^= std::byte{4};
    EXPECT_FALSE(parse_superblock(page, header()).ok()) << i;
    page[i] ^= std::byte{4};
  }
  VolumeHeader other = header();
  other.uuid[3] = std::byte{1};
  Status foreign = parse_superblock(page, other).status();
  EXPECT_EQ(foreign.code(), Code::kCorrupt);
  EXPECT_NE(foreign.text().find("abababab"), std::string::npos);
}

}  // namespace
}  // namespace zinf::tier
