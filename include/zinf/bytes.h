// Byte sizes as people write them: "4GB" (10^9), "512MiB" (2^20), "4096".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "zinf/status.h"

namespace zinf {

// Accepts a plain number of bytes, or a number (also "1.5") and one of B, KB,
// MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB in any case, with or without a space.
// Everything else ("4G", "-1GB", "", too large for 64 bits) is kInvalid with a
// text that says what to write instead.
Result<std::uint64_t> parse_bytes(std::string_view text);

// For people, binary, three significant digits: "1.5 GiB",
// "4 KiB", "17 B".
std::string format_bytes(std::uint64_t bytes);

// The same, rounded up: parse_bytes() of it is enough for so many.
std::string format_bytes_up(std::uint64_t bytes);

// Bandwidth for people, decimal: "3.71 GB/s".
std::string format_rate(double bytes_per_second);

}  // namespace zinf
