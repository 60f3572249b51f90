// What goes before everything that ranks send each other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

namespace zinf::shard {

enum class Kind : std::uint32_t {
  kPull,     // a slice is wanted, on Lane::kWeights
  kPulls,    // small ones are, together; their requests follow
  kPart,     // of a gradient; its bytes follow
  kClose,    // a pass; the units that it brought follow
  kChange,   // of a unit is announced
  kContent,  // what the sender's last change of a unit has made of it
  kFailed,   // the reason follows
  kEnd,      // nothing more on any lane
};

// What goes before everything, in the byte order of the machine: all ranks are
// of one kind.
struct Header {
  Kind kind = Kind::kEnd;
  std::uint32_t unit = 0;
  // The pass, or how many; of a change; the hash of a content.
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;  // that follow, or are wanted
  // Of the unit, for comparing; the sender's.
  std::uint64_t elements = 0;
  std::uint64_t element_bytes = 0;
  std::uint64_t passes = 0;   // that the sender has closed
  std::uint64_t changes = 0;  // of the unit, that it has announced
  char name[64] = {};         // the end of a long one; what is closed
};
static_assert(std::is_trivially_copyable_v<Header>);

inline std::span<std::byte> bytes_of(Header& header) {
  return std::as_writable_bytes(std::span(&header, 1));
}

inline std::string_view end_of(std::string_view name) {
  constexpr std::size_t kMost = sizeof(Header::name) - 1;
  return name.substr(name.size() - std::min(name.size(), kMost));
}

}  // namespace zinf::shard
