// Adam where the weight is: on a device, with the bits of zinf/adam.h.
//
// Note [Same bits on a device]: only operators are used that devices round
// correctly (sums, products, quotients, casts), one at a time, so that no
// compiler can fuse them. Where the definition (src/optim/element.h) fuses a
// product and a sum, the product is exact in float64; the sum is rounded to odd
// there with the help of its own error, and then to float32, which gives the
// fused result (Boldo and Melquiond). A root is taken in float64, where the
// last bit does not matter: roots of float32 in float32 are off by one in a
// fifth of all cases with torch's CPU kernel. A quotient has a tensor below the
// line: with a number, CUDA multiplies by its reciprocal.
//
// It takes some fifty operators and 40 bytes of temporary memory per element,
// in pieces; a device reads and writes that faster than a link moves a gradient
// and a weight.
#pragma once

#include "adapters/torch/adam.h"
#include "zinf/adam.h"
#include "zinf/status.h"

namespace zinf {

// As adam_update(), for tensors that are all on one device with float64; a
// split master is refused. It is queued on the current stream.
Status adam_update_on_device(const AdamOptions& options, const AdamStep& step,
                             const AdamTensors& tensors);

}  // namespace zinf
