#include <gtest/gtest.h>

#include <sstream>

#include "adapters/torch/host_allocator.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/torch/training.h"

namespace zinf {
namespace {

using torch::optim::OptimizerParamGroup;

std::string refusal(const AdamWOptions& options) {
  return error_of([&] { AdamW optimizer(make_net()->parameters(), options); });
}

TEST(AdamW, RefusesOptionsThatMakeNoSense) {
  EXPECT_EQ(refusal(-1.0), "lr is -1, must not be negative");
  EXPECT_EQ(refusal(AdamWOptions().eps(-1)), "eps is -1, must not be negative");
  EXPECT_EQ(refusal(AdamWOptions().betas({0.9, 1})),
            "betas are (0.9, 1), must be in [0, 1)");
  EXPECT_EQ(refusal(AdamWOptions().max_grad_norm(0)),
            "max_grad_norm is 0, must be positive");
  EXPECT_EQ(refusal(AdamWOptions().update("later")),
            "update is \"later\", must be \"step\" or \"backward\"");
  for (AdamWOptions options :
       {AdamWOptions().micro_batches(2),
        AdamWOptions().update("backward").micro_batches(0)}) {
    EXPECT_TRUE(says(refusal(options), "it is for update=\"backward\""));
  }
  EXPECT_TRUE(says(refusal(AdamWOptions().master("none")),
                   "must be \"split\" or \"plain\""));
}

TEST(AdamW, PlacementAndMasterFormatDoNotChangeABit) {
  for (auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    Net plain = make_net();
    plain->to(dtype);
    AdamW plain_optimizer(plain->parameters(), 1e-2);
    train(plain, plain_optimizer, 3);
    for (const char* master : {"split", "plain"}) {
      TempDir dir;
      Engine engine(on_nvme(dir.path()));
      Net net = make_net();
      net->to(dtype);
      engine.adopt(net);
      AdamW optimizer(net->parameters(), AdamWOptions(1e-2).master(master));
      train(net, optimizer, 3);
      EXPECT_TRUE(same_bits(contents(*plain), contents(*net)))
          << dtype << " " << master;
      EXPECT_EQ(engine.stats().audit_violations, 0);
    }
  }
}

// One limit of two to a power: see clip_factor() in adapters/torch.
TEST(AdamW, MaxGradNormIsClipGradNorm) {
  Net clipped = make_net();
  AdamW by_torch(clipped->parameters(), 1e-2);
  for (int i = 0; i < 3; ++i) {
    backward(clipped);
    double norm =
        torch::nn::utils::clip_grad_norm_(clipped->parameters(), 0.125);
    ASSERT_GT(norm, 0.125);
    by_torch.step();
    by_torch.zero_grad();
  }
  Net net = make_net();
  AdamW optimizer(net->parameters(), AdamWOptions(1e-2).max_grad_norm(0.125));
  train(net, optimizer, 3);
  EXPECT_TRUE(same_bits(contents(*clipped), contents(*net)));
}

std::vector<OptimizerParamGroup> two_groups(Net& net) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(net->first->parameters(),
                      std::make_unique<AdamWOptions>(0.5));
  groups.emplace_back(net->second->parameters());
  return groups;
}

TEST(AdamW, GroupsHaveTheirOwnOptionsAndInheritTheRest) {
  Net apart = make_net();
  AdamW first(apart->first->parameters(), AdamWOptions(0.5).weight_decay(0.3));
  AdamW second(apart->second->parameters(),
               AdamWOptions(0.1).weight_decay(0.3));
  for (int i = 0; i < 2; ++i) {
    backward(apart);
    first.step();
    second.step();
    first.zero_grad();
    second.zero_grad();
    apart->norm->zero_grad();
  }
  Net net = make_net();
  AdamW optimizer(two_groups(net), AdamWOptions(0.1).weight_decay(0.3));
  ASSERT_EQ(optimizer.param_groups().size(), 2);
  train(net, optimizer, 2);
  EXPECT_TRUE(same_bits(contents(*apart), contents(*net)));

  OptimizerParamGroup own(
      net->norm->parameters(),
      std::make_unique<AdamWOptions>(AdamWOptions().max_grad_norm(1)));
  EXPECT_TRUE(says(error_of([&] { optimizer.add_param_group(own); }),
                   "micro_batches and master are the optimizer's"));
  OptimizerParamGroup foreign(net->norm->parameters(),
                              std::make_unique<torch::optim::SGDOptions>(0.1));
  EXPECT_TRUE(says(error_of([&] { optimizer.add_param_group(foreign); }),
                   "zinf::AdamWOptions"));
}

TEST(AdamW, FollowsASchedulerOfTorch) {
  Net net = make_net();
  AdamW optimizer(net->parameters(), 0.8);
  torch::optim::StepLR schedule(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  for (int i = 0; i < 2; ++i) {  // torch's first one changes nothing
    train(net, optimizer, 1);
    schedule.step();
  }
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.4);
}

TEST(AdamW, ReturnsTheLossOfAClosure) {
  Net net = make_net();
  AdamW optimizer(net->parameters());
  torch::Tensor loss = optimizer.step([&] {
    auto value = net(torch::ones({4, 8})).sum();
    value.backward();
    return value;
  });
  EXPECT_TRUE(loss.defined());
}

TEST(AdamW, GoesThroughAnArchiveOfTorch) {
  for (auto dtype : {torch::kFloat, torch::kBFloat16}) {
    TempDir dir;
    Engine engine(on_nvme(dir.path()));
    Net net = make_net();
    net->to(dtype);
    engine.adopt(net);
    AdamW optimizer(net->parameters(), 1e-2);
    train(net, optimizer, 2);
    std::stringstream file;
    torch::save(optimizer, file);

    // The same weights with the states from the archive.
    Net twin = make_net();
    twin->to(dtype);
    copy_contents(*net, *twin);
    AdamW restored(twin->parameters(), 1e-3);
    torch::load(restored, file);
    EXPECT_EQ(restored.param_groups()[0].options().get_lr(), 1e-2);
    torch::manual_seed(1);
    train(net, optimizer, 2);
    torch::manual_seed(1);
    train(twin, restored, 2);
    EXPECT_TRUE(same_bits(contents(*net), contents(*twin))) << dtype;
  }
}

TEST(AdamW, ABudgetThatCannotWorkIsRefusedWithTheLeastThatWould) {
  constexpr std::uint64_t kExtra = std::uint64_t{3} << 20;
  TempDir dir;
  {
    Engine first;
  }  // from here on tensors are counted
  process_memory()->trim();
  std::uint64_t used = Engine().stats().host_used_bytes;
  Engine engine({.host_memory = used + kExtra, .nvme = dir.path()});
  torch::nn::Sequential model;
  {
    auto init = engine.init();
    for (int i = 0; i < 8; ++i) {  // 1 MiB each
      model->push_back(
          torch::nn::Linear(torch::nn::LinearOptions(512, 512).bias(false)));
    }
  }
  for (const char* update : {"step", "backward"}) {
    EXPECT_TRUE(says(error_of([&] {
                       AdamW optimizer(model->parameters(),
                                       AdamWOptions().update(update));
                     }),
                     "at least 4.0 MiB for one update"));
  }
  EXPECT_THROW(AdamW(model->parameters()), BudgetError);
}

TEST(AdamW, SavingLeavesMastersSplit) {
  TempDir dir;
  Engine engine;
  Net net = make_net();
  net->to(torch::kBFloat16);
  engine.adopt(net);
  AdamW optimizer(net->parameters(), 1e-2);
  train(net, optimizer, 1);
  std::uint64_t before = engine.stats().resident_bytes;
  engine.save(dir.path() + "/saved");
  std::stringstream file;
  torch::save(optimizer, file);
  EXPECT_EQ(engine.stats().resident_bytes, before);
}

TEST(AdamW, FollowsAWeightToAnotherType) {
  Net net = make_net();
  AdamW optimizer(net->parameters(), 1e-2);
  for (auto dtype : {torch::kFloat, torch::kBFloat16, torch::kFloat}) {
    net->to(dtype);
    train(net, optimizer, 1);
  }
  net->to(torch::kDouble);
  backward(net, torch::kDouble);
  EXPECT_TRUE(says(error_of([&] { optimizer.step(); }), "not Double"));
  EXPECT_TRUE(
      says(error_of([&] { AdamW(net->parameters(), 1e-2); }), "not Double"));
}

TEST(AdamW, RefusesSparseGradients) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(10, 4).sparse(true));
  AdamW optimizer(table->parameters());
  table(torch::tensor({1, 2})).sum().backward();
  EXPECT_TRUE(says(error_of([&] { optimizer.step(); }), "sparse"));
}

}  // namespace
}  // namespace zinf
