// "did you mean": the nearest known name to what somebody wrote.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace zinf {

// The known name with the fewest edits to `name`, or "" when none is near
// enough (a third of its length) to be what was meant.
std::string nearest_name(std::string_view name,
                         std::span<const std::string> known);

// "did you mean x?", or "known are x, y" when none is near.
std::string name_hint(std::string_view name,
                      std::span<const std::string> known);

}  // namespace zinf
