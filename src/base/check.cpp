#include "src/base/check.h"

#include <cstdio>
#include <cstdlib>

#include "src/base/strf.h"

namespace zinf {

void check_failed(const char* file, int line, const char* condition,
                  const char* format, ...) {
  std::va_list args;
  va_start(args, format);
  std::string message = vstrf(format, args);
  va_end(args);
  std::fprintf(stderr, "zinf: %s:%d: check failed: %s: %s\n", file, line,
               condition, message.c_str());
  std::abort();
}

}  // namespace zinf
