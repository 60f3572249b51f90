// The boundary where a Status becomes an exception for C++ and Python users.
#pragma once

#include <stdexcept>

#include "zinf/status.h"

namespace zinf {

// what() is the Status's text.
class Error : public std::runtime_error {
 public:
  explicit Error(const Status& status);
  Code code() const { return code_; }

 private:
  Code code_;
};

// For kOverBudget.
class BudgetError : public Error {
 public:
  using Error::Error;
};

void throw_if_error(const Status& status);

// Called instead of throwing a BudgetError: it throws what its language has for
// one.
void set_budget_thrower(void (*thrower)(const Status& status));

}  // namespace zinf
