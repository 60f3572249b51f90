// Optimizers that update managed parameters unit by unit.
#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace zinf {

struct AdamWImpl;

// In a parameter group, an option that has its default value is the
// optimizer's, as in torch; the last four are the optimizer's alone.
struct AdamWOptions
    : public torch::optim::OptimizerCloneableOptions<AdamWOptions> {
  using Betas = std::tuple<double, double>;

  // NOLINTNEXTLINE(google-explicit-constructor): as in torch
  AdamWOptions(double lr = 1e-3) : lr_(lr) {}

  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(Betas, betas) = Betas(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  // Clips with the bits of Python's clip_grad_norm_, for float32 gradients.
  TORCH_ARG(std::optional<double>, max_grad_norm) = std::nullopt;
  // "step": when step() is called. "backward": inside backward, as soon as a
  // gradient is complete: it takes the least memory and time, and gradients are
  // gone when backward returns (touching one throws).
  TORCH_ARG(std::string, update) = "step";
  // With update("backward"): how many backward passes make one step.
  TORCH_ARG(std::int64_t, micro_batches) = 1;
  // "split": of the master of a managed bfloat16 weight only the 16 bits that
  // the weight lacks are kept; "plain": all 32. The results are the same.
  TORCH_ARG(std::string, master) = "split";

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr_; }
  void set_lr(const double lr) override { lr_ = lr; }
};

// AdamW with the bits of Python's zinf.AdamW, which are those of
// torch.optim.AdamW(fused=True), wherever the states live. Weights in bfloat16
// or float16 get a float32 master. On parameters without an engine it is a
// plain in-memory optimizer with the same arithmetic. One at a time.
class AdamW : public torch::optim::Optimizer {
 public:
  // Throws what is wrong with the options, and BudgetError when no update could
  // ever run within host_memory.
  explicit AdamW(std::vector<torch::Tensor> params, AdamWOptions defaults = {});
  explicit AdamW(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      AdamWOptions defaults = {});
  ~AdamW() override;
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;

  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // With update("backward") gradients go, whatever it is told.
  void zero_grad(bool set_to_none = true);

  // After an update that failed half way it throws until Engine::load() or
  // torch::load() has brought a good state. With update("backward") it updates
  // what backward has left: all of it when gradients are clipped.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // What torch::save(optimizer, ...) and torch::load() call.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  friend struct AdamWImpl;
  std::unique_ptr<AdamWImpl> impl_;
};

}  // namespace zinf
