#include <torch/serialize/archive.h>

#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/error.h"
#include "src/base/strf.h"

namespace zinf {
namespace {

void check_choice(const char* name, const std::string& value,
                  const std::string& one, const std::string& other) {
  if (value == one || value == other) return;
  refuse(strf("%s is \"%s\", must be \"%s\" or \"%s\"", name, value.c_str(),
              one.c_str(), other.c_str()));
}

}  // namespace

void check_options(const AdamWOptions& options) {
  check_choice("update", options.update(), "step", "backward");
  check_choice("master", options.master(), "split", "plain");
  auto batches = static_cast<long long>(options.micro_batches());
  if (batches < 1 || (batches > 1 && options.update() == "step")) {
    refuse(
        strf("micro_batches is %lld: it is for update=\"backward\", 1 or "
             "more; update=\"step\" needs none, gradients add up until "
             "zero_grad() as usual",
             batches));
  }
  std::optional<double> norm = options.max_grad_norm();
  if (norm && !(*norm > 0)) {
    refuse(strf("max_grad_norm is %g, must be positive", *norm));
  }
  using Named = std::pair<const char*, double>;
  for (const auto& [name, value] :
       {Named("lr", options.lr()), Named("eps", options.eps()),
        Named("weight_decay", options.weight_decay())}) {
    if (!(value >= 0))
      refuse(strf("%s is %g, must not be negative", name, value));
  }
  auto [beta1, beta2] = options.betas();
  for (double beta : {beta1, beta2}) {
    if (!(beta >= 0 && beta < 1)) {
      refuse(strf("betas are (%g, %g), must be in [0, 1)", beta1, beta2));
    }
  }
}

AdamWOptions merged(const AdamWOptions& group, const AdamWOptions& defaults) {
  const AdamWOptions unset;
  auto own = [](const auto& value, const auto& usual, const auto& default_) {
    return value != usual && value != default_;
  };
  if (own(group.max_grad_norm(), unset.max_grad_norm(),
          defaults.max_grad_norm()) ||
      own(group.update(), unset.update(), defaults.update()) ||
      own(group.micro_batches(), unset.micro_batches(),
          defaults.micro_batches()) ||
      own(group.master(), unset.master(), defaults.master())) {
    refuse(
        "max_grad_norm, update, micro_batches and master are the optimizer's: "
        "a parameter group cannot have its own");
  }
  AdamWOptions options = defaults;
  if (group.lr() != unset.lr()) options.lr(group.lr());
  if (group.betas() != unset.betas()) options.betas(group.betas());
  if (group.eps() != unset.eps()) options.eps(group.eps());
  if (group.weight_decay() != unset.weight_decay()) {
    options.weight_decay(group.weight_decay());
  }
  return options;
}

const AdamWOptions& options_of(const torch::optim::OptimizerOptions& options) {
  auto* ours = dynamic_cast<const AdamWOptions*>(&options);
  if (ours == nullptr) {
    refuse(
        "a parameter group of zinf::AdamW has zinf::AdamWOptions, not "
        "another optimizer's");
  }
  return *ours;
}

AdamOptions adam_options(const torch::optim::OptimizerParamGroup& group) {
  const AdamWOptions& options = options_of(group.options());
  auto [beta1, beta2] = options.betas();
  return {.lr = options.lr(),
          .beta1 = beta1,
          .beta2 = beta2,
          .eps = options.eps(),
          .weight_decay = options.weight_decay(),
          .decay = WeightDecay::kDecoupled};
}

void AdamWOptions::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("lr", c10::IValue(lr_));
  archive.write("betas", c10::IValue(betas_));
  archive.write("eps", c10::IValue(eps_));
  archive.write("weight_decay", c10::IValue(weight_decay_));
}

void AdamWOptions::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue value;
  archive.read("lr", value);
  lr_ = value.toDouble();
  archive.read("betas", value);
  betas_ = value.to<Betas>();
  archive.read("eps", value);
  eps_ = value.toDouble();
  archive.read("weight_decay", value);
  weight_decay_ = value.toDouble();
}

}  // namespace zinf
