// Writes a JSON object, member by member, in the order given. (Reading is left
// to a library.)
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zinf {

// JsonObject().add("block", 4096).add("backend", "io_uring").text()
class JsonObject {
 public:
  JsonObject& add(std::string_view name, std::string_view value);
  JsonObject& add(std::string_view name, const char* value) {
    return add(name, std::string_view(value));
  }
  JsonObject& add(std::string_view name, bool value);
  JsonObject& add(std::string_view name, int value) {
    return add(name, static_cast<std::int64_t>(value));
  }
  JsonObject& add(std::string_view name, std::int64_t value);
  JsonObject& add(std::string_view name, std::uint64_t value);
  JsonObject& add(std::string_view name, double value);  // not finite: null
  JsonObject& add(std::string_view name, std::optional<double> value);
  JsonObject& add(std::string_view name, const std::vector<JsonObject>& list);
  JsonObject& add(std::string_view name, const std::vector<std::string>& list);
  JsonObject& add(std::string_view name,
                  const std::vector<std::uint64_t>& list);
  JsonObject& add(std::string_view name, const std::vector<double>& list);

  std::string text() const { return "{" + members_ + "}"; }

 private:
  JsonObject& add_raw(std::string_view name, const std::string& value);

  std::string members_;
};

// The text in quotes; what is not valid UTF-8 becomes U+FFFD.
std::string json_quoted(std::string_view text);

}  // namespace zinf
