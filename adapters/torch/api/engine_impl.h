// What is behind zinf::Engine: a manager, and the models that it knows.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zinf/need.h"

namespace zinf {

class AdamW;
class Manager;
class SameRandom;
struct EngineOptions;
enum class Ending : std::uint8_t;

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;
using Models = std::vector<std::shared_ptr<torch::nn::Module>>;

// One at a time.
class EngineImpl {
 public:
  explicit EngineImpl(const EngineOptions& options);
  ~EngineImpl();

  void begin_init();
  void end_init();
  void adopt(torch::nn::Module& model);
  void release(torch::nn::Module& model);
  void close(Ending ending);

  Need probe(const std::function<void()>& step);

  // Between steps: what has come since, or could not be taken before.
  void refresh(bool all_managed);

  // Others wait for this rank: where an exception ends it, they are told.
  void tell_of_exception();

  void check_open() const;
  // That are in no other one and were not released, in the order of adoption.
  Models models() const;
  // The zinf optimizers over their parameters, in the order of their making.
  std::vector<AdamW*> optimizers() const;

  const std::shared_ptr<Manager>& manager() const { return manager_; }
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

 private:
  using WeakModule = std::weak_ptr<torch::nn::Module>;

  void note_closed();
  void adopt_parameters_of(torch::nn::Module& model);
  // Inside init() on several ranks: parameters are split as they come, as the
  // whole model may not fit. C++ tells nobody of them, but the birth of the
  // next tensor is a moment to look.
  void on_born(const at::Tensor& tensor);
  // All ranks have rank 0's parameters and buffers.
  void share(const torch::nn::Module& model);

  const std::shared_ptr<Manager> manager_;
  const int rank_;
  const int num_ranks_;
  const int exceptions_;  // that were on their way when it was made
  std::unique_ptr<SameRandom> same_random_;  // inside init(), on several ranks
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>>
      born_;  // no parameters yet
  std::vector<WeakModule> adopted_;
  std::set<WeakModule, std::owner_less<>> released_;
  bool closed_ = false;
};

// A module's parameters, tied ones once.
NamedParameters parameters_of(const torch::nn::Module& model);

}  // namespace zinf
