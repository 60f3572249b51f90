// Operators over lists of tensors, run piece by piece: `clip_grad_norm_`,
// `GradScaler` and most optimizers are made of them, and would otherwise need
// everything in memory at once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "adapters/torch/policy.h"

namespace zinf {

// False when the whole fits into one piece, or cannot be cut: then nothing was
// done. Same bits as the whole: on CPU such operators treat every tensor of
// their lists by itself.
bool run_in_pieces(const c10::OperatorHandle& op, const Policy& policy,
                   c10::DispatchKeySet rest, torch::jit::Stack* stack);

}  // namespace zinf
