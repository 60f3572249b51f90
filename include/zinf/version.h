#pragma once

namespace zinf {

// "0.1.0", from version.txt.
const char* version();

}  // namespace zinf
