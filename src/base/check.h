// Checks for bugs in zinf itself. Bad input, full disks and the like are never
// checked this way: they are a Status.
#pragma once

namespace zinf {

// Prints "FILE:LINE: check failed: CONDITION: MESSAGE" and aborts.
[[noreturn, gnu::format(printf, 4, 5)]] void check_failed(
    const char* file, int line, const char* condition, const char* format, ...);

}  // namespace zinf

// ZINF_CHECK(condition, "printf format", ...): always on.
#define ZINF_CHECK(condition, ...)                                       \
  do {                                                                   \
    if (!(condition)) [[unlikely]]                                       \
      ::zinf::check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__); \
  } while (false)

// The same in debug builds only, for what costs too much on a hot path.
#ifdef NDEBUG
#define ZINF_DCHECK(condition, ...)                \
  do {                                             \
    if (false) ZINF_CHECK(condition, __VA_ARGS__); \
  } while (false)
#else
#define ZINF_DCHECK(condition, ...) ZINF_CHECK(condition, __VA_ARGS__)
#endif
