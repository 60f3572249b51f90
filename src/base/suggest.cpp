#include "src/base/suggest.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace zinf {
namespace {

// Levenshtein distance, one row at a time.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_name(std::string_view name,
                         std::span<const std::string> known) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(name.size() / 3, 1) + 1;
  for (const std::string& candidate : known) {
    std::size_t distance = edit_distance(name, candidate);
    // "uring" means "io_uring", however much is missing.
    bool part = name.size() >= 3 && candidate.find(name) != std::string::npos;
    if (part && best.empty()) {
      best = candidate;
      best_distance = std::min(best_distance, distance);
      continue;
    }
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string name_hint(std::string_view name,
                      std::span<const std::string> known) {
  const std::string near = nearest_name(name, known);
  if (!near.empty()) return "did you mean " + near + "?";
  std::string hint = "known are";
  const char* separator = " ";
  for (const std::string& each : known) {
    hint += separator + each;
    separator = ", ";
  }
  return hint;
}

}  // namespace zinf
