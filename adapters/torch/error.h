// The boundary where a Status becomes an exception for C++ and Python users.
#pragma once

#include "zinf/error.h"

namespace zinf {

void throw_if_error(const Status& status);

// Called instead of throwing a BudgetError: it throws what its language has for
// one.
void set_budget_thrower(void (*thrower)(const Status& status));

}  // namespace zinf
