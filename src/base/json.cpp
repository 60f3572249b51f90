#include "src/base/json.h"

#include <array>
#include <charconv>
#include <cmath>

#include "src/base/strf.h"

namespace zinf {
namespace {

// Bytes of the UTF-8 character that begins here; 0 when it is none.
std::size_t character_bytes(std::string_view text) {
  auto byte = [&](std::size_t i) {
    return static_cast<unsigned char>(text[i]);
  };
  unsigned char first = byte(0);
  std::size_t bytes = first < 0x80                     ? 1
                      : first >= 0xC2 && first <= 0xDF ? 2
                      : (first & 0xF0) == 0xE0         ? 3
                      : first >= 0xF0 && first <= 0xF4 ? 4
                                                       : 0;
  if (bytes > text.size()) return 0;
  // Longer forms than needed, surrogates, and beyond U+10FFFF.
  if ((first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F) ||
      (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F)) {
    return 0;
  }
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  return bytes;
}

template <typename T, typename Text>
std::string list_of(const std::vector<T>& list, Text text) {
  std::string all;
  for (const T& one : list) all += (all.empty() ? "" : ", ") + text(one);
  return "[" + all + "]";
}

std::string number_text(double value) {
  if (!std::isfinite(value)) return "null";
  std::array<char, 32> text{};  // the shortest that reads back as `value`
  auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

}  // namespace

std::string json_quoted(std::string_view text) {
  std::string quoted = "\"";
  while (!text.empty()) {
    std::size_t bytes = character_bytes(text);
    char c = text.front();
    if (bytes == 0) {
      quoted += "\\ufffd";
      bytes = 1;
    } else if (c == '"' || c == '\\') {
      quoted += {'\\', c};
    } else if (bytes == 1 && static_cast<unsigned char>(c) < 0x20) {
      quoted += strf("\\u%04x", static_cast<unsigned>(c));
    } else {
      quoted += text.substr(0, bytes);
    }
    text.remove_prefix(bytes);
  }
  return quoted + "\"";
}

JsonObject& JsonObject::add_raw(std::string_view name,
                                const std::string& value) {
  if (!members_.empty()) members_ += ", ";
  members_ += json_quoted(name) + ": " + value;
  return *this;
}

JsonObject& JsonObject::add(std::string_view name, std::string_view value) {
  return add_raw(name, json_quoted(value));
}

JsonObject& JsonObject::add(std::string_view name, bool value) {
  return add_raw(name, value ? "true" : "false");
}

JsonObject& JsonObject::add(std::string_view name, std::int64_t value) {
  return add_raw(name, std::to_string(value));
}

JsonObject& JsonObject::add(std::string_view name, std::uint64_t value) {
  return add_raw(name, std::to_string(value));
}

JsonObject& JsonObject::add(std::string_view name, double value) {
  return add_raw(name, number_text(value));
}

JsonObject& JsonObject::add(std::string_view name,
                            std::optional<double> value) {
  return value ? add(name, *value) : add_raw(name, "null");
}

JsonObject& JsonObject::add(std::string_view name,
                            const std::vector<JsonObject>& list) {
  return add_raw(
      name, list_of(list, [](const JsonObject& one) { return one.text(); }));
}

JsonObject& JsonObject::add(std::string_view name,
                            const std::vector<std::string>& list) {
  return add_raw(name, list_of(list, json_quoted));
}

JsonObject& JsonObject::add(std::string_view name,
                            const std::vector<std::uint64_t>& list) {
  return add_raw(name, list_of(list, [](std::uint64_t one) {
                   return std::to_string(one);
                 }));
}

JsonObject& JsonObject::add(std::string_view name,
                            const std::vector<double>& list) {
  return add_raw(name, list_of(list, number_text));
}

}  // namespace zinf
