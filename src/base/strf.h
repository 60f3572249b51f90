// printf into a std::string. (No fmt: torch's headers bring another version.)
#pragma once

#include <cstdarg>
#include <string>
#include <string_view>

namespace zinf {

[[gnu::format(printf, 1, 2)]] std::string strf(const char* format, ...);
std::string vstrf(const char* format, std::va_list args);

// The length of a view for "%.*s".
inline int len(std::string_view text) { return static_cast<int>(text.size()); }

}  // namespace zinf
