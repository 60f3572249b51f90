// Where torch tells of gradients and of `.data =`, which pass by the
// dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace zinf {

class Manager;

// From now on `p.data = x` makes x's storage a unit when p's was one.
void watch_data_assignments();

// Makes the gradients of a leaf units when autograd has accumulated them. One
// place per tensor: a Python hook of that kind that is registered later takes
// it, and gradients become units at the next step only.
void watch_gradients(const std::shared_ptr<Manager>& manager,
                     const at::Tensor& leaf);

// Takes that back.
void unwatch_gradients(const at::Tensor& leaf);

}  // namespace zinf
