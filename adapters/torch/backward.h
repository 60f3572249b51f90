// update="backward": parameters are updated inside backward, when their
// gradients are complete.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "src/base/interrupts.h"
#include "zinf/adam.h"

namespace zinf {

// What happens to an optimizer's parameters in the backward passes of one step:
// the optimizer, whose language is open, tells of gradients and makes the
// updates.
//
// A gradient that was used is replaced by a tensor that raises when it is
// touched. What is not managed, what waits for the norm of all gradients, and
// what the last of several passes did not reach, is left for step().
//
// From the first update of a pass to its end SIGINT is held back. One that
// comes from then until step() has made that step's updates final:
// interrupted() tells, and the next backward does not wait for step().
//
// Thread-safe; nothing is locked while it calls others. `fail` may be called as
// long as it lives.
class BackwardUpdate final
    : public std::enable_shared_from_this<BackwardUpdate> {
 public:
  // Makes the updates that were deferred, at the end of a pass.
  using Update = std::function<void(const std::vector<at::Tensor>& deferred)>;
  // Called when an exception has ended a pass after its first update: weights
  // and states do not fit together any more.
  using Fail = std::function<void(const std::string& why)>;
  // Tells the optimizer's options, for comparing them with other ranks'.
  using How = std::function<std::string()>;
  // Does what is left of step() and zero_grad(): an interrupt has kept the
  // caller from it.
  using Finish = std::function<void()>;

  BackwardUpdate(std::int64_t micro_batches, Update update, Fail fail,
                 How how = {}, Finish finish = {})
      : micro_batches_(micro_batches),
        update_(std::move(update)),
        fail_(std::move(fail)),
        how_(std::move(how)),
        finish_(std::move(finish)) {}

  // From now on the next backward over this leaf finishes a step that was
  // interrupted.
  void watch(const at::Tensor& leaf);

  // Inside backward, when a gradient was accumulated. True: it is complete and
  // does not wait for others, so the parameter is to be updated now; never of
  // one that is split over ranks, which `update` hears of when all have
  // theirs. Throws when the pass was not announced.
  bool on_gradient(const at::Tensor& parameter, bool waits);
  // In the place of that update: it is made at the end of the pass. For a first
  // step, in which the budget may still refuse something: no weight is changed
  // before that is known.
  void defer(const at::Tensor& parameter);
  // Around that update. Returns the options of the parameter's group, which are
  // fixed by the first update of a step. Throws what is due for an interrupt
  // before the first one.
  AdamOptions begin_update(std::size_t group, const AdamOptions& options);
  void end_update(const at::Tensor& parameter);

  // Whether there was a pass since the last step.
  bool begun() const;
  // Whether one was updated inside backward since then.
  bool any_updated() const;
  // Whether there was a SIGINT since the first update of the last step.
  bool interrupted() const;
  // The groups' options, or what was used of them already in this step.
  std::vector<AdamOptions> fixed_options(std::vector<AdamOptions> groups) const;
  // Throws when one of the groups' options differs from what was used already.
  void check_options(const std::vector<AdamOptions>& groups) const;
  // step() has updated the rest, or a good state was loaded.
  void end_step(const std::vector<at::Tensor>& updated);

 private:
  class Pass;
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

  void hold_interrupts();
  void before_gradient(const at::Tensor& leaf);
  void enter_pass();
  void leave_pass(bool whole);
  void fail_if_changed();

  const std::int64_t micro_batches_;
  const Update update_;
  const Fail fail_;
  const How how_;
  const Finish finish_;

  mutable std::mutex mutex_;          // for what follows
  std::weak_ptr<Pass> pass_;          // that is under way
  std::int64_t passes_ = 0;           // since the last step
  bool changed_ = false;              // a weight, in the pass that is under way
  std::vector<at::Tensor> deferred_;  // in the pass that is under way
  std::unordered_set<WeakTensor> updated_;  // in this step
  std::map<std::size_t, AdamOptions> fixed_;
  std::weak_ptr<HoldInterrupts> hold_;  // until the end of the pass
  std::optional<WatchInterrupts> interrupts_;
};

}  // namespace zinf
