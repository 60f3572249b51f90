#include "src/plan/numbers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "src/base/strf.h"
#include "zinf/bytes.h"

namespace zinf::plan {

namespace {

std::uint64_t whole(double bytes) {
  return static_cast<std::uint64_t>(std::clamp(bytes, 0.0, 0x1p63));
}

}  // namespace

std::string bytes_text(double bytes) { return format_bytes(whole(bytes)); }

std::string bytes_up_text(double bytes) {
  return format_bytes_up(whole(std::ceil(bytes)));
}

std::string number_text(double value) {
  constexpr double kSmall = 1e-4;  // below it %g writes exponents
  if (value > 0 && value < kSmall) {
    const int zeros = static_cast<int>(-std::floor(std::log10(value)));
    return strf("%.*f", std::min(zeros + 2, 18), value);
  }
  if (value < 999.5) return strf("%.3g", value);
  std::string digits = strf("%.0f", value);
  for (std::size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, ",");
  return digits;
}

std::string count_text(double count) {
  if (count >= 1e12) return number_text(count / 1e12) + " trillion";
  if (count >= 1e9) return number_text(count / 1e9) + " billion";
  if (count >= 1e6) return number_text(count / 1e6) + " million";
  return number_text(count);
}

std::string time_text(double seconds) {
  constexpr double kDay = 86400;
  constexpr double kYear = 365.25 * kDay;
  if (seconds < 1e-3) return number_text(seconds * 1e6) + " us";
  if (seconds < 1) return number_text(seconds * 1e3) + " ms";
  if (seconds < 600) return number_text(seconds) + " s";
  if (seconds < 7200) return number_text(seconds / 60) + " minutes";
  if (seconds < 2 * kDay) return number_text(seconds / 3600) + " hours";
  if (seconds < 2 * kYear) return number_text(seconds / kDay) + " days";
  return count_text(seconds / kYear) + " years";
}

}  // namespace zinf::plan
