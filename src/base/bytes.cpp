#include "zinf/bytes.h"

#include <array>
#include <charconv>
#include <cmath>

#include "src/base/strf.h"

namespace zinf {
namespace {

struct Unit {
  std::string_view name;  // lower case
  double bytes;
};

constexpr std::array<Unit, 12> kUnits = {{{"", 1},
                                          {"b", 1},
                                          {"kb", 1e3},
                                          {"mb", 1e6},
                                          {"gb", 1e9},
                                          {"tb", 1e12},
                                          {"pb", 1e15},
                                          {"kib", 0x1p10},
                                          {"mib", 0x1p20},
                                          {"gib", 0x1p30},
                                          {"tib", 0x1p40},
                                          {"pib", 0x1p50}}};

constexpr const char* kTooMuch =
    "it does not fit in 64 bits, which is more than any memory";

Status bad_size(std::string_view text, const std::string& hint) {
  return Status::error(
      Code::kInvalid,
      strf("\"%.*s\" is not a size: %s", len(text), text.data(), hint.c_str()));
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

std::string_view strip(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

struct Scaled {
  double value;
  const char* unit;
};

// In the largest binary unit of which there is one.
Scaled split(std::uint64_t bytes) {
  constexpr std::array<const char*, 6> kNames = {"B",   "KiB", "MiB",
                                                 "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  return {value, kNames[unit]};
}

// Three significant digits, without trailing zeros.
std::string number_text(double value) {
  const char* format = value >= 100 ? "%.0f" : value >= 10 ? "%.1f" : "%.2f";
  std::string number = strf(format, value);
  if (number.find('.') != std::string::npos) {
    while (number.back() == '0') number.pop_back();
    if (number.back() == '.') number.pop_back();
  }
  return number;
}

}  // namespace

Result<std::uint64_t> parse_bytes(std::string_view text) {
  const std::string general =
      "write a number of bytes, or a number with a unit such as \"4GB\" or "
      "\"512MiB\"";
  std::string_view body = strip(text);
  if (body.empty()) return bad_size(text, general);
  if (body.front() == '-') {
    return bad_size(text, "it cannot be negative");
  }

  // A plain integer is exact over the whole 64-bit range.
  std::uint64_t whole = 0;
  const char* end = body.data() + body.size();
  auto [whole_end, whole_error] = std::from_chars(body.data(), end, whole);
  if (whole_end == end) {
    if (whole_error == std::errc()) return whole;
    return bad_size(text, kTooMuch);
  }

  double number = 0;
  auto [number_end, number_error] =
      std::from_chars(body.data(), end, number, std::chars_format::fixed);
  if (number_error != std::errc() || !std::isfinite(number)) {
    return bad_size(text, general);
  }
  std::string_view rest(number_end, static_cast<std::size_t>(end - number_end));
  std::string unit = lower(strip(rest));
  for (const Unit& known : kUnits) {
    if (unit != known.name) continue;
    if (unit.empty()) return bad_size(text, "a part of a byte; " + general);
    double bytes = number * known.bytes;
    if (bytes >= 0x1p64) return bad_size(text, kTooMuch);
    return static_cast<std::uint64_t>(bytes);
  }
  if (unit.size() == 1 &&
      std::string_view("kmgtp").find(unit[0]) != std::string_view::npos) {
    const char* number_text = body.data();
    int digits = static_cast<int>(number_end - number_text);
    char letter = static_cast<char>(unit[0] - 'a' + 'A');
    return bad_size(
        text, strf("write \"%.*s%cB\" (decimal) or \"%.*s%ciB\" (binary)",
                   digits, number_text, letter, digits, number_text, letter));
  }
  return bad_size(text, strf("unknown unit \"%s\"; ", unit.c_str()) + general);
}

std::string format_bytes(std::uint64_t bytes) {
  const auto [value, unit] = split(bytes);
  return number_text(value) + " " + unit;
}

std::string format_bytes_up(std::uint64_t bytes) {
  const std::string near = format_bytes(bytes);
  const Result<std::uint64_t> parsed = parse_bytes(near);
  if (!parsed.ok() || parsed.value() >= bytes) return near;
  const auto [value, unit] = split(bytes);
  const double last = value >= 100 ? 1 : value >= 10 ? 0.1 : 0.01;
  return number_text(value + last) + " " + unit;
}

std::string format_rate(double bytes_per_second) {
  return strf("%.2f GB/s", bytes_per_second / 1e9);
}

}  // namespace zinf
