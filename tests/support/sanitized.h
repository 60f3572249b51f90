// Whether this build runs under a sanitizer, which needs address space and
// time.
#pragma once

namespace zinf {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Its runtime's locks stay held in the child of a process with threads.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitizerHangsAfterFork = true;
#else
inline constexpr bool kSanitizerHangsAfterFork = false;
#endif

}  // namespace zinf
