// Values to and from the bytes of Python's torch.save(), so that checkpoints
// are the same in both languages.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

#include "zinf/status.h"

namespace zinf {

// The same value in the types that both languages know. kInvalid names the part
// of it that is neither a tensor, a number, a text or None, nor a list, tuple
// or dictionary of these.
Result<c10::IValue> plain_value(const c10::IValue& value,
                                const std::string& name);

// What torch.load(weights_only=True) reads, of a plain value.
Result<std::string> pickle_value(const c10::IValue& value);

// kUnsupported for what Python has and C++ has not: numpy's arrays, integers of
// more than 64 bits.
Result<c10::IValue> unpickle_value(const std::string& data);

}  // namespace zinf
