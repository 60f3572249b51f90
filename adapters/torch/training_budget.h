// Whether a model and its optimizer can be trained with the memory and the disk
// that its engine may use, told before the first step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zinf {

class Manager;

struct TrainingPlan {
  std::vector<at::Tensor> parameters;  // of the manager
  std::vector<at::Tensor> fresh;  // of these, those that have no states yet
  bool split = true;    // masters of bfloat16 weights take 2 bytes, not 4
  bool waiting = true;  // gradients of all parameters are there at once
};

// What an update of a managed parameter on the CPU needs in memory.
struct UpdateBytes {
  std::uint64_t moving = 0;      // for the update only, with the gradient
  std::uint64_t grad = 0;        // of it
  std::uint64_t new_states = 0;  // that stay, if it has none yet
  bool weight_stays = false;
};
UpdateBytes update_bytes(const at::Tensor& parameter, bool split);

// Throws BudgetError unless the first update of the parameter, whose gradient
// is in memory, has room now. Its states do not stay.
void check_first_update(const at::Tensor& parameter, bool split);

// Reserves on NVMe what does not fit in host memory, or is to live there: so
// the disk is not the one that says no later. Throws BudgetError, with what is
// needed and found, when one update can never fit in memory or the rest not on
// NVMe. What activations need is known from the passes so far.
void check_training(Manager& manager, const TrainingPlan& plan);

// Throws BudgetError when the largest unit on a device does not fit in
// device_memory by itself.
void check_device_memory(Manager& manager);

}  // namespace zinf
