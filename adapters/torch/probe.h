// engine.probe(): what a training step needs of host_memory, measured without
// training.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "zinf/budget.h"
#include "zinf/need.h"

namespace zinf {

class Manager;

// Measures while it lives, one in the process at a time: the budget is the
// process's. It stands for the updates of optimizers, whose language is open:
// it takes their memory and changes nothing. Not thread-safe.
class Probe {
 public:
  using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

  // Gradients are put aside, and the content of buffers, outside of what is
  // measured. Throws when another one is under way.
  static std::shared_ptr<Probe> begin(std::shared_ptr<Manager> manager,
                                      NamedParameters parameters,
                                      const std::vector<at::Tensor>& buffers);
  ~Probe();  // end()
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  // The one that measures, or null.
  static std::shared_ptr<Probe> under_way();

  // From now on memory is taken for the states that the first updates of these
  // parameters make, where those stay in memory: every later step has them
  // beside its activations.
  void hold_states(const std::vector<at::Tensor>& fresh, bool split);

  // In the place of an optimizer's step(): of the parameters that are due,
  // `fresh` have no states yet.
  void step(const std::vector<at::Tensor>& due,
            const std::vector<at::Tensor>& fresh, bool split);
  // In the place of an update inside backward, of a weight that stays in
  // memory.
  void update(const at::Tensor& parameter, bool is_fresh, bool split);

  // The measuring is over; gradients and buffers are what they were.
  Need end();
  // Throws when the step has changed a weight.
  void check_weights() const;

 private:
  struct Kept;

  explicit Probe(std::shared_ptr<Manager> manager);
  void keep(NamedParameters parameters, const std::vector<at::Tensor>& buffers);
  void put_back();
  void hold(const at::Tensor& parameter, bool split);

  const std::shared_ptr<Manager> manager_;
  std::unique_ptr<Kept> kept_;
  std::unordered_set<const c10::TensorImpl*> states_;  // whose memory is held:
  std::vector<Reservation> held_;
  Need need_;
  std::atomic<bool> measuring_ = false;  // read by autograd's threads
};

}  // namespace zinf
