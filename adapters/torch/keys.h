// The two dispatch keys by which operators on managed tensors reach zinf.
//
// The outer key lies above autograd and sees what a user calls; the inner one
// lies just above the kernels and sees what the outer one cannot: inner tensors
// of wrapper subclasses, and lists of tensors piece by piece. Torch itself has
// no kernels for either.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

namespace zinf {

inline constexpr c10::DispatchKey kOuterKey = c10::DispatchKey::DeferredInit;
inline constexpr c10::DispatchKey kInnerKey = c10::DispatchKey::CustomRNGKeyId;

// Views and detached copies of the tensor keep the keys; clones do not.
void add_keys(c10::TensorImpl& tensor);
void remove_keys(c10::TensorImpl& tensor);

}  // namespace zinf
