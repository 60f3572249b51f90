// What an engine does, for Python and C++ alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zinf/engine_stats.h"

namespace zinf {

class Manager;
struct EngineOptions;
struct UnitName;
enum class Ending : std::uint8_t;

// The manager of a new engine, with operators and assignments watched. Throws
// what is wrong with the options.
std::shared_ptr<Manager> make_manager(const EngineOptions& options);
// Throws why it is still open, or what is lost.
void close_manager(Manager& manager, Ending ending);

// As HostMemory does, with all that the machine has left.
void start_measuring(Manager& manager);

EngineStats engine_stats(Manager& manager);

// The manager of a tensor, or null.
std::shared_ptr<Manager> manager_of(const at::Tensor& tensor);
// Of many: each once, null for what has none.
std::vector<std::shared_ptr<Manager>> managers_of(
    const std::vector<at::Tensor>& tensors);

// `later`: what cannot be adopted now is tried again by itself.
void adopt_parameter(const std::shared_ptr<Manager>& manager,
                     const at::Tensor& tensor, const std::string& name,
                     std::size_t tensors, bool later);

// All parameters of a model: those that share a storage are known users of it.
// False when some could not be taken.
bool adopt_parameters(
    const std::shared_ptr<Manager>& manager,
    const std::vector<std::pair<std::string, at::Tensor>>& named);

// How messages call the gradient of a parameter.
UnitName grad_name(const at::Tensor& parameter);

// What an optimizer keeps for a parameter lives where the parameter's engine
// has its states; nothing happens without one.
void adopt_state(const at::Tensor& parameter, const at::Tensor& state,
                 const std::string& name);

// Whether a parameter's states may live on its device: see Manager.
bool states_fit_beside(const at::Tensor& parameter);

// An optimizer's state for a parameter, float32 zeros in its layout; managed,
// if the parameter is.
at::Tensor zeros_for(const at::Tensor& parameter, const std::string& name,
                     c10::Device device);

// A managed parameter's gradient may leave memory from now on.
void offer_gradient(const at::Tensor& parameter);
// Puts a tensor that raises in the place of a managed parameter's gradient.
void consume_gradient(const at::Tensor& parameter);
bool is_consumed(const at::Tensor& grad);

bool is_split_over_ranks(const at::Tensor& tensor);
// What this rank keeps of a parameter that is split over ranks, and of its
// gradient: slices, one-dimensional. Of any other: itself.
at::Tensor shard_of(const at::Tensor& parameter);
at::Tensor shard_grad_of(const at::Tensor& parameter);

// A plain tensor again.
void release_tensor(const at::Tensor& tensor);
// The same, in memory that no budget counts.
void release_from_budget(const at::Tensor& tensor);

}  // namespace zinf
