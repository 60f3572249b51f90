// What zinf throws at C++ and Python users: a Status as an exception.
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

// For kOverBudget: a budget is too small.
class BudgetError : public Error {
 public:
  using Error::Error;
};

}  // namespace zinf
