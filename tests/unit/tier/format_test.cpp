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
TEST(Format, PagesAreAsDocumented) {
  Page page;
  encode(VolumeHeader{.uuid = geometry().uuid,
                      .index = 1,
                      .count = 2,
                      .volume_bytes = 50 * kUnit,
                      .block_bytes = 4 * kUnit,
                      .metadata_bytes = 7 * kUnit,
                      .state_bytes = 1234,
                      .num_states = 5,
                      .extra_bytes = 678,
                      .kept = 3,
                      .copies = 2},
         page);
  EXPECT_EQ(text(page, 0, 8), "ZINFVOL\n");
  EXPECT_EQ(at<std::uint32_t>(page, 8), 1u);
  EXPECT_EQ(at<std::uint32_t>(page, 12), 1u);
  EXPECT_EQ(page[16], std::byte{0xab});
  EXPECT_EQ(at<std::uint32_t>(page, 32), 2u);
  EXPECT_EQ(at<std::uint32_t>(page, 36), 3u);
  EXPECT_EQ(at<std::uint64_t>(page, 40), 50 * kUnit);
  EXPECT_EQ(at<std::uint64_t>(page, 48), 4 * kUnit);
  EXPECT_EQ(at<std::uint64_t>(page, 56), 7 * kUnit);
  EXPECT_EQ(at<std::uint64_t>(page, 64), 1234u);
  EXPECT_EQ(at<std::uint64_t>(page, 72), 5u);
  EXPECT_EQ(at<std::uint64_t>(page, 80), 678u);
  EXPECT_EQ(at<std::uint32_t>(page, 88), 2u);
  EXPECT_EQ(at<std::uint64_t>(page, 4088),
            checksum(std::span(page).first(4088)));

  encode(Superblock{.uuid = geometry().uuid,
                    .sequence = 42,
                    .next_version = 8,
                    .catalog = {{{0, 5 * kUnit, 2 * kUnit}}, 5000, 77}},
         page);
  EXPECT_EQ(text(page, 0, 8), "ZINFSUP\n");
  EXPECT_EQ(page[12], std::byte{0xab});
  EXPECT_EQ(at<std::uint64_t>(page, 28), 42u);
  EXPECT_EQ(at<std::uint64_t>(page, 36), 8u);
  EXPECT_EQ(at<std::uint64_t>(page, 44), 5000u);
  EXPECT_EQ(at<std::uint64_t>(page, 52), 77u);
  EXPECT_EQ(at<std::uint32_t>(page, 60), 1u);
  EXPECT_EQ(at<std::uint32_t>(page, 64), 0u);
  EXPECT_EQ(at<std::uint32_t>(page, 68), 2u);
  EXPECT_EQ(at<std::uint64_t>(page, 72), 5 * kUnit);
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
  encode(Superblock{.uuid = geometry().uuid, .sequence = 1, .catalog = {}},
         page);
  ASSERT_TRUE(parse_superblock(page, geometry()).ok());
  for (std::size_t i = 0; i < page.size(); ++i) {
    page[i] ^= std::byte{4};
    EXPECT_FALSE(parse_superblock(page, geometry()).ok()) << i;
    page[i] ^= std::byte{4};
  }
  Geometry other = geometry();
  other.uuid[3] = std::byte{1};
  Status foreign = parse_superblock(page, other).status();
  EXPECT_EQ(foreign.code(), Code::kCorrupt);
  EXPECT_NE(foreign.text().find("abababab"), std::string::npos);
}

}  // namespace
}  // namespace zinf::tier
