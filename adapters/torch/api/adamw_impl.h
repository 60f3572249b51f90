// What is behind zinf::AdamW, for those who save, load and release its states.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "zinf/adam.h"
#include "zinf/optim.h"

namespace zinf {

class BackwardUpdate;
class Probe;
class Ranks;
class SplitMaster;
class ThreadPool;

// Of one parameter.
struct AdamWState
    : public torch::optim::OptimizerCloneableParamState<AdamWState> {
  std::int64_t step = 0;  // updates so far
  at::Tensor exp_avg;     // float32
  at::Tensor exp_avg_sq;
  at::Tensor master;  // for a narrow weight, unless
  std::shared_ptr<SplitMaster> split;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

struct AdamWImpl {
  std::string failure;  // weights and states do not fit together any more
  std::shared_ptr<BackwardUpdate> backward;  // with update="backward"
  // Inside backward every device has its thread. Where a gradient is sent to
  // other ranks, updates of what has come from them are made meanwhile.
  std::recursive_mutex updating;

  static AdamWImpl& of(AdamW& optimizer) { return *optimizer.impl_; }
  static const AdamWImpl& of(const AdamW& optimizer) {
    return *optimizer.impl_;
  }
};

// Throws what is wrong with them.
void check_options(const AdamWOptions& options);
// A group's options: what was not set is the optimizer's.
AdamWOptions merged(const AdamWOptions& group, const AdamWOptions& defaults);
const AdamWOptions& options_of(const torch::optim::OptimizerOptions& options);
AdamOptions adam_options(const torch::optim::OptimizerParamGroup& group);
// Whether masters of bfloat16 weights are split.
bool is_split(const AdamW& optimizer);

// Throws after an update that was not finished, until heal(): a good state was
// loaded.
void check_usable(const AdamW& optimizer);
void heal(AdamW& optimizer);

// Of parameters with gradients. prepare() refuses what can be refused, before
// anything is changed; budgets only with `check`.
void prepare(AdamW& optimizer, const std::vector<at::Tensor>& parameters,
             bool check = true);
void update(AdamW& optimizer, const AdamOptions& options,
            const std::vector<at::Tensor>& parameters, float clip,
            bool may_wait);

// For engine.probe(): throws between backward and step(); states that first
// updates would make are held; after the probed step it is as if there had been
// none.
void check_no_step_begun(const AdamW& optimizer);
void hold_states(const AdamW& optimizer, Probe& probe);
void forget_passes(AdamW& optimizer);

// For update="backward".
std::shared_ptr<BackwardUpdate> make_backward_update(AdamW& optimizer);
void watch_gradients(AdamW& optimizer, std::size_t group);
// Updates those that wait until the end of a pass, or until other ranks have
// their gradients too. What another optimizer has is left to it.
void update_deferred(AdamW& optimizer, const std::vector<at::Tensor>& deferred);
// Throws when another optimizer updates one of them inside backward.
void check_alone(const std::vector<at::Tensor>& parameters);

// Where the parameters are split over ranks. Of the engines of the parameters;
// throws when one that has a gradient is not split, as ranks would train it
// each for itself.
std::vector<Ranks*> ranks_of(const AdamW& optimizer);
// Its options, in short: ranks compare them.
std::string how_text(const AdamW& optimizer);
// Other ranks' backward passes may have had gradients where this one had none.
void make_up_passes(AdamW& optimizer, Ranks& ranks);
// The norm of all ranks' slices of the gradients, summed in float64.
double norm_of_slices(Ranks& ranks, const std::vector<at::Tensor>& parameters);
// An archive of one rank holds the slices that it keeps, and says which;
// check_slices() throws where this rank keeps others.
void write_slices(const AdamW& optimizer,
                  torch::serialize::OutputArchive& archive);
void check_slices(const AdamW& optimizer,
                  torch::serialize::InputArchive& archive);

bool is_narrow(const at::Tensor& parameter);
std::vector<at::Tensor> all_parameters(const AdamW& optimizer);

// A parameter's state, or null.
AdamWState* find_state(const AdamW& optimizer, const at::Tensor& parameter);
// A new one: zeros, and the weight as its own master. All or nothing.
AdamWState& make_state(AdamW& optimizer, const at::Tensor& parameter);
// The master of a narrow weight: `value`, or the weight where it is undefined.
void set_master(const AdamW& optimizer, AdamWState& state,
                const at::Tensor& parameter, const at::Tensor& value);
// States that came from an archive go where the parameter's belong.
void adopt_loaded_state(const AdamW& optimizer, AdamWState& state,
                        const at::Tensor& parameter);
void drop_state(AdamW& optimizer, const at::Tensor& parameter);
// Makes it plain tensors in memory.
void release_state(AdamW& optimizer, const at::Tensor& parameter);
// What was released is managed again.
void adopt_states(AdamW& optimizer, const at::Tensor& parameter);

// Of a split one, in float32; it stays split.
at::Tensor copy_of_master(const AdamWState& state, const at::Tensor& parameter);

// Its tensors by name, with the master in float32, which it is until the next
// update.
std::vector<std::pair<std::string, at::Tensor>> tensors_of(
    const AdamWState& state, const at::Tensor& parameter);

}  // namespace zinf
