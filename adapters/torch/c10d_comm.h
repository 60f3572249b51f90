// A group of the processes that torchrun has started: messages over a process
// group of torch.
#pragma once

#include <memory>
#include <string>

#include "zinf/comm.h"
#include "zinf/status.h"

namespace zinf {

// Over the gloo group that torch.distributed knows by this name, of which no
// reference is kept: kNotFound when there is none (any more). It must be for
// this Comm alone, and its timeout must be longer than any wait: others may be
// slow, and a rank that ends is noticed by itself.
Result<std::unique_ptr<Comm>> make_c10d_comm(const std::string& group_name);

}  // namespace zinf
