#include "src/base/strf.h"

#include <cstdio>

namespace zinf {

std::string vstrf(const char* format, std::va_list args) {
  std::va_list again;
  va_copy(again, args);
  int size = std::vsnprintf(nullptr, 0, format, args);
  std::string text(size > 0 ? static_cast<std::size_t>(size) : 0, '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  return text;
}

std::string strf(const char* format, ...) {
  std::va_list args;
  va_start(args, format);
  std::string text = vstrf(format, args);
  va_end(args);
  return text;
}

}  // namespace zinf
