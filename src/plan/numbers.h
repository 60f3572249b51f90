// Numbers as people read them: three or four digits, no exponents.
#pragma once

#include <string>

namespace zinf::plan {

std::string bytes_text(double bytes);     // "1.5 GiB"
std::string bytes_up_text(double bytes);  // not less: to be enough
std::string number_text(double value);    // "0.25", "17.8", "108,243"
std::string count_text(double count);     // "8.03 billion"
std::string time_text(double seconds);    // "17.8 s", "4.93 years"

}  // namespace zinf::plan
