// How operators on managed tensors reach zinf: boxed kernels on two keys.
#pragma once

#include <cstdint>

namespace zinf {

// Puts the inner key's kernel on the operators that would pass it by: once, and
// again later for operators that were registered since. Returns how many.
std::int64_t wire_operators();

// Calls that had a managed argument, in this process.
std::uint64_t num_intercepted();

}  // namespace zinf
