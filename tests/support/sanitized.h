// Whether this build runs under a sanitizer, which needs address space and
// time.
#pragma once

namespace zinf {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace zinf
