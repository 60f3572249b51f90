// How an operator runs on the emulated device: at once, or in the queue of the
// current stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace zinf::emulated {

// A boxed kernel for every operator: the CPU's kernel over the device's memory.
//
// It runs later, by the current stream's thread, when what it returns is known
// before: from an earlier call with the same shapes. What has not been called
// so before, draws random numbers (the generator is the host's), returns a
// number, or has a shape that depends on data, waits for the stream and runs
// before the call returns.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// aten::_copy_from: between the host and the device, and within the device. The
// call returns before the copy is done when both are on the device, or when the
// caller allows it and the host's memory is pinned.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to,
                     bool non_blocking);

}  // namespace zinf::emulated
