// The boundary where a Status becomes an exception for C++ and Python users.
#pragma once

#include <string>

#include "zinf/error.h"

namespace zinf {

// A refusal of host_memory or device_memory itself comes from an operator that
// asked for more: its text then goes on with what that means and what to do.
void throw_if_error(const Status& status);

// Throws: the caller's request makes no sense as it stands.
[[noreturn]] void refuse(const std::string& text);

// Called instead of throwing a BudgetError: it throws what its language has for
// one.
void set_budget_thrower(void (*thrower)(const Status& status));

}  // namespace zinf
