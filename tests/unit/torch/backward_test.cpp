#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"
#include "tests/unit/torch/training.h"

namespace zinf {
namespace {

AdamWOptions in_backward() { return AdamWOptions(1e-2).update("backward"); }

Net trained(const AdamWOptions& options, torch::ScalarType dtype,
            Engine* engine = nullptr) {
  Net net = make_net();
  net->to(dtype);
  if (engine != nullptr) engine->adopt(net);
  AdamW optimizer(net->parameters(), options);
  for (int i = 0; i < 3; ++i) {
    for (int micro = 0; micro < 2; ++micro) backward(net, dtype);
    optimizer.step();
    optimizer.zero_grad();
  }
  return net;
}

TEST(BackwardUpdate, HasTheBitsOfAnUpdateInStep) {
  for (auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (std::optional<double> norm : {std::optional<double>(), {0.1}}) {
      AdamWOptions options = AdamWOptions(1e-2).max_grad_norm(norm);
      Net plain = trained(options, dtype);
      TempDir dir;
      Engine engine(on_nvme(dir.path()));
      Net net =
          trained(options.update("backward").micro_batches(2), dtype, &engine);
      EXPECT_TRUE(same_bits(contents(*plain), contents(*net)))
          << dtype << (norm ? " clipped" : "");
      EXPECT_EQ(engine.stats().audit_violations, 0);
      EXPECT_EQ(engine.stats().undeclared_writes, 0);
    }
  }
}

// A model that an engine manages, with an optimizer that updates in backward.
struct Managed {
  explicit Managed(const AdamWOptions& options = in_backward())
      : engine(on_nvme(dir.path())),
        net(make_net(&engine)),
        optimizer(net->parameters(), options) {}

  TempDir dir;
  Engine engine;
  Net net;
  AdamW optimizer;
};

TEST(BackwardUpdate, AUsedGradientThrowsUntilItIsDropped) {
  Managed ours;
  backward(ours.net);
  torch::Tensor grad = ours.net->first->weight.grad();
  ASSERT_TRUE(grad.defined());
  EXPECT_TRUE(says(error_of([&] { (void)grad.sum(); }),
                   "was used by the update inside backward"));
  ours.optimizer.step();
  EXPECT_TRUE(says(error_of([&] { backward(ours.net); }),
                   "was used by the update inside backward"));
  ours.optimizer.zero_grad(/*set_to_none=*/false);
  EXPECT_FALSE(ours.net->first->weight.grad().defined());
  train(ours.net, ours.optimizer, 1);
}

TEST(BackwardUpdate, GradientsDoNotPileUp) {
  TempDir dir;
  EngineOptions options = on_nvme(dir.path());
  options.audit = false;
  Engine engine(options);
  torch::nn::Sequential model;
  {
    auto init = engine.init();
    for (int i = 0; i < 12; ++i) model->push_back(torch::nn::Linear(256, 256));
  }
  engine.adopt(model);
  AdamW optimizer(model->parameters(), in_backward());
  for (int i = 0; i < 2; ++i) {
    model->forward(torch::ones({2, 256})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  // One weight, its gradient and its states.
  EXPECT_LE(engine.stats().peak_resident_bytes, 4 * 256 * 256 * 4 + 64 * 1024);
}

TEST(BackwardUpdate, ASecondPassMustBeAnnounced) {
  Net plain = make_net();
  AdamW plain_optimizer(plain->parameters(), 1e-2);
  train(plain, plain_optimizer, 1);
  Managed ours;
  backward(ours.net);
  ours.net->zero_grad();
  EXPECT_TRUE(says(error_of([&] { backward(ours.net); }), "micro_batches=2"));
  ours.net->zero_grad();
  ours.optimizer.step();  // the first one counts, and nothing is broken
  EXPECT_TRUE(torch::equal(plain->first->weight, ours.net->first->weight));
}

TEST(BackwardUpdate, OptionsAreFixedBetweenBackwardAndStep) {
  Managed ours;
  auto& options = ours.optimizer.param_groups()[0].options();
  backward(ours.net);
  options.set_lr(1);
  EXPECT_TRUE(says(error_of([&] { ours.optimizer.step(); }),
                   "set it back, call step(), then change it"));
  options.set_lr(1e-2);
  ours.optimizer.step();
  options.set_lr(1);  // after step() it may
  ours.optimizer.zero_grad();
  train(ours.net, ours.optimizer, 1);
}

struct Break : torch::autograd::Function<Break> {
  static torch::Tensor forward(torch::autograd::AutogradContext*,
                               const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*,
      const torch::autograd::variable_list&) {
    throw std::out_of_range("in the middle");
  }
};

TEST(BackwardUpdate, AfterAnExceptionEverythingThrowsUntilLoad) {
  Managed ours;
  train(ours.net, ours.optimizer, 1);
  std::string path = ours.dir.path() + "/saved";
  ours.engine.save(path);
  train(ours.net, ours.optimizer, 1);
  auto expected = contents(*ours.net);

  torch::Tensor hidden = ours.net->first(torch::ones({1, 8}));
  torch::Tensor loss = ours.net->second(Break::apply(hidden)).sum();
  EXPECT_THROW(loss.backward(), std::out_of_range);
  const char* why = "exception inside backward";
  EXPECT_TRUE(says(error_of([&] { backward(ours.net); }), why));
  EXPECT_TRUE(says(error_of([&] { ours.optimizer.step(); }), why));
  EXPECT_TRUE(says(error_of([&] { ours.engine.save(path + "2"); }), why));
  EXPECT_TRUE(says(error_of([&] { ours.engine.load(path + "2"); }), "exist"));
  EXPECT_TRUE(says(error_of([&] { backward(ours.net); }), why));
  ours.engine.load(path);
  ours.optimizer.zero_grad();
  train(ours.net, ours.optimizer, 1);
  EXPECT_TRUE(same_bits(expected, contents(*ours.net)));
}

TEST(BackwardUpdate, AnExceptionBeforeTheFirstUpdateHarmsNobody) {
  Managed ours;
  torch::Tensor loss = Break::apply(ours.net(torch::ones({2, 8}))).sum();
  EXPECT_THROW(loss.backward(), std::out_of_range);
  ours.optimizer.zero_grad();
  train(ours.net, ours.optimizer, 1);
}

TEST(BackwardUpdate, WithoutAnEngineStepUpdates) {
  Net plain = make_net();
  AdamW plain_optimizer(plain->parameters(), 1e-2);
  train(plain, plain_optimizer, 2);
  Net net = make_net();
  AdamW optimizer(net->parameters(), in_backward());
  train(net, optimizer, 2);
  EXPECT_TRUE(same_bits(contents(*plain), contents(*net)));
}

TEST(BackwardUpdate, TwoOptimizersCannotShareAParameter) {
  Managed ours;
  EXPECT_TRUE(says(
      error_of([&] { AdamW second(ours.net->parameters(), in_backward()); }),
      "another optimizer with update=\"backward\""));
  train(ours.net, ours.optimizer, 1);
}

TEST(BackwardUpdate, AnotherOptimizerMayFollow) {
  TempDir dir;
  Engine engine(on_nvme(dir.path()));
  Net net = make_net(&engine);
  Net plain = make_net();
  for (auto options : {in_backward(), in_backward(), AdamWOptions(1e-2)}) {
    AdamW plain_optimizer(plain->parameters(), 1e-2);
    torch::manual_seed(3);
    train(plain, plain_optimizer, 2);
    AdamW optimizer(net->parameters(), options);
    torch::manual_seed(3);
    train(net, optimizer, 2);
    EXPECT_TRUE(same_bits(contents(*plain), contents(*net)));
  }
  // Nobody updates any more: gradients are those of a plain model.
  backward(net);
  EXPECT_GT(net->first->weight.grad().abs().sum().item<float>(), 0);
}

TEST(BackwardUpdate, GoesOnAfterReleaseAndAdopt) {
  Net plain = make_net();
  AdamW plain_optimizer(plain->parameters(), 1e-2);
  train(plain, plain_optimizer, 3);
  Managed ours;
  train(ours.net, ours.optimizer, 1);
  ours.engine.release(ours.net);
  train(ours.net, ours.optimizer, 1);
  ours.engine.adopt(ours.net);
  backward(ours.net);
  EXPECT_TRUE(
      says(error_of([&] { (void)ours.net->first->weight.grad().sum(); }),
           "was used by the update inside backward"));
  ours.optimizer.step();
  EXPECT_TRUE(same_bits(contents(*plain), contents(*ours.net)));
}

}  // namespace
}  // namespace zinf
