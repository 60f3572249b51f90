// Whether a model and its optimizer can be trained within host_memory at all.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zinf {

// What an optimizer keeps.
struct UpdateNeeds {
  bool split = true;    // masters of bfloat16 take 2 bytes instead of 4
  bool waiting = true;  // gradients of all parameters are there at once
};

// Throws BudgetError, with the least that would do, when an update of one of
// the managed parameters could never fit.
void check_budget(const std::vector<at::Tensor>& parameters,
                  const UpdateNeeds& needs);

}  // namespace zinf
