// The boundary where a Status becomes an exception for C++ and Python users.
#pragma once

#include "zinf/error.h"

namespace zinf {

void throw_if_error(const Status& status);

}  // namespace zinf
