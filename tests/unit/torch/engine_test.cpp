#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/support/scratch_bytes.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/torch/training.h"

namespace zinf {
namespace {

TEST(Engine, RefusesOptionsThatMakeNoSense) {
  TempDir dir;
  auto refusal = [](const EngineOptions& options) {
    return error_of([&] { Engine engine(options); });
  };
  EXPECT_TRUE(says(refusal({.host_memory = "4G"}), "host_memory: "));
  EXPECT_TRUE(says(refusal({.host_memory = 0}), "more than nothing"));
  EXPECT_TRUE(says(refusal({.host_memory = -1}), "more than nothing"));
  EXPECT_TRUE(
      says(refusal({.host_memory = "99999999PB"}), "more than any memory"));
  EXPECT_TRUE(says(refusal({.device_memory = "1GB"}), "no device"));
  EXPECT_TRUE(
      says(refusal({.weights = "disk"}), "weights is \"disk\", must be"));
  EXPECT_TRUE(says(refusal({.states = "nvme"}), "nvme"));
  EXPECT_TRUE(says(refusal({.evict = "never"}),
                   "evict is \"never\", must be \"auto\" or \"always\""));
  EXPECT_TRUE(says(refusal({.nvme = dir.path() + "/none"}),
                   "does not exist: name a directory"));
  EXPECT_TRUE(says(refusal({.nvme = "/proc"}), "takes no files ("));
  EXPECT_EQ(refusal({.host_memory = "1GB", .nvme = {dir.path()}}), "");
}

TEST(Engine, ParametersBornInInitHaveThePlainValues) {
  TempDir dir;
  Net plain = make_net();
  Engine engine(on_nvme(dir.path()));
  Net net = make_net(&engine);
  EXPECT_EQ(engine.stats().managed, 6);
  EXPECT_EQ(engine.stats().resident_bytes, 0);
  EXPECT_TRUE(same_bits(contents(*plain), contents(*net)));
  EXPECT_EQ(engine.stats().audit_violations, 0);
}

TEST(Engine, InitEndsWithItsGuardAndCannotBeNested) {
  Engine engine;
  {
    auto init = engine.init();
    EXPECT_TRUE(says(error_of([&] { auto again = engine.init(); }), "nested"));
    torch::Tensor passing = torch::ones({4});
    EXPECT_EQ(engine.stats().managed, 1);
    init.end();
    EXPECT_EQ(engine.stats().managed, 0);
    EXPECT_EQ(passing.sum().item<float>(), 4);
  }
  auto init = engine.init();
}

TEST(Engine, TrainsWithTheBitsOfAPlainRun) {
  TempDir dir;
  Net plain = make_net();
  AdamW plain_optimizer(plain->parameters());
  train(plain, plain_optimizer, 4);

  Engine engine(on_nvme(dir.path()));
  Net net = make_net(&engine);
  AdamW optimizer(net->parameters());
  train(net, optimizer, 4);
  EXPECT_TRUE(same_bits(contents(*plain), contents(*net)));
  EXPECT_EQ(engine.stats().managed, 6 + 12);
  EXPECT_EQ(engine.stats().audit_violations, 0);
  EXPECT_EQ(engine.stats().undeclared_writes, 0);
}

TEST(Engine, AdoptsAModelThatExists) {
  TempDir dir;
  Net plain = make_net();
  Net net = make_net();
  net->first->bias.set_requires_grad(false);
  Engine engine(on_nvme(dir.path()));
  engine.adopt(net);
  engine.adopt(net);
  EXPECT_EQ(engine.stats().managed, 6);
  EXPECT_TRUE(same_bits(contents(*plain), contents(*net)));
}

TEST(Engine, AdoptRefusesWhatItCannotHold) {
  Engine engine;
  NetImpl on_the_stack;
  EXPECT_TRUE(
      says(error_of([&] { engine.adopt(on_the_stack); }), "std::shared_ptr"));
  Net net = make_net(&engine);
  Engine other;
  EXPECT_TRUE(says(error_of([&] { other.adopt(net); }),
                   "first.weight is managed by another engine"));
}

TEST(Engine, CloseGivesEverythingBack) {
  TempDir dir;
  Net plain = make_net();
  Engine engine(on_nvme(dir.path()));
  Net net = make_net(&engine);
  EXPECT_GT(scratch_bytes(dir.path()), 0u);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  engine.close();
  engine.close();
  EXPECT_EQ(scratch_bytes(dir.path()), 0u);
  EXPECT_EQ(engine.stats().managed, 0);
  EXPECT_TRUE(same_bits(contents(*plain), contents(*net)));
  EXPECT_EQ(error_of([&] { engine.adopt(net); }), "the engine is closed");
  EXPECT_EQ(error_of([&] { auto init = engine.init(); }),
            "the engine is closed");
  EXPECT_EQ(error_of([&] { engine.save(dir.path() + "/x"); }),
            "the engine is closed");
}

TEST(Engine, CloseAndReleaseKeepWhatTheBudgetCannotHold) {
  TempDir dir;
  auto make = [] {
    torch::manual_seed(0);
    torch::nn::Sequential net;
    for (int i = 0; i < 8; ++i) net->push_back(torch::nn::Linear(256, 256));
    return net;
  };
  auto train = [](torch::nn::Sequential& net) {
    AdamW optimizer(net->parameters());
    for (int i = 0; i < 2; ++i) {
      net->forward(torch::ones({2, 256})).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  torch::nn::Sequential plain = make();
  train(plain);
  for (bool release : {false, true}) {
    torch::nn::Sequential net = nullptr;
    {
      Engine engine({.host_memory = "7MiB", .nvme = {dir.path()}});
      {
        auto init = engine.init();
        net = make();
      }
      train(net);
      if (release) engine.release(net);
      engine.close();
    }
    EXPECT_TRUE(same_bits(contents(*plain), contents(*net))) << release;
  }
}

TEST(Engine, DiscardGivesNothingBack) {
  TempDir dir;
  Engine engine(on_nvme(dir.path()));
  Net net = make_net(&engine);
  engine.close_and_discard();
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  EXPECT_TRUE(says(error_of([&] { (void)net->first->weight.sum(); }),
                   "was discarded when its engine was closed"));
}

TEST(Engine, TheDestructorCloses) {
  TempDir dir;
  Net net = nullptr;
  {
    Engine engine(on_nvme(dir.path()));
    net = make_net(&engine);
    AdamW optimizer(net->parameters());
    train(net, optimizer, 1);
  }
  EXPECT_EQ(scratch_bytes(dir.path()), 0u);
  AdamW optimizer(net->parameters());
  train(net, optimizer, 1);
}

TEST(Engine, AReleasedModelGoesOnAsAPlainOne) {
  for (auto dtype : {torch::kFloat, torch::kBFloat16}) {
    TempDir dir;
    Net plain = make_net();
    plain->to(dtype);
    AdamW plain_optimizer(plain->parameters());
    train(plain, plain_optimizer, 4);

    Engine engine(on_nvme(dir.path()));
    Net net = make_net();
    net->to(dtype);
    engine.adopt(net);
    AdamW optimizer(net->parameters());
    train(net, optimizer, 2);
    engine.release(net);
    EXPECT_EQ(engine.stats().managed, 0);
    train(net, optimizer, 2);
    EXPECT_EQ(engine.stats().managed, 0);
    EXPECT_TRUE(same_bits(contents(*plain), contents(*net))) << dtype;
    EXPECT_TRUE(says(error_of([&] { engine.release(net); }),
                     "does not manage the model"));
  }
}

TEST(Engine, LoadContinuesExactly) {
  TempDir dir;
  Engine engine(on_nvme(dir.path()));
  Net net = make_net(&engine);
  AdamW optimizer(net->parameters(), AdamWOptions(1e-2).weight_decay(0.1));
  train(net, optimizer, 2);
  c10::impl::GenericDict extra(c10::AnyType::get(), c10::AnyType::get());
  extra.insert("epoch", std::int64_t{3'000'000'000});
  extra.insert("losses", std::vector<double>{1.5, 2.5});
  extra.insert("tensor", torch::arange(5).slice(0, 1, 3));
  engine.save(dir.path() + "/saved", extra);
  train(net, optimizer, 3);
  auto expected = contents(*net);

  optimizer.param_groups()[0].options().set_lr(5);
  Loaded loaded = engine.load(dir.path() + "/saved");
  EXPECT_EQ(loaded.step, 2);
  auto dict = loaded.extra.toGenericDict();
  EXPECT_EQ(dict.at("epoch").toInt(), 3'000'000'000);
  EXPECT_EQ(dict.at("losses").toListRef()[1].toDouble(), 2.5);
  EXPECT_EQ(dict.at("tensor").toTensor().sum().item<int>(), 3);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-2);
  train(net, optimizer, 3);
  EXPECT_TRUE(same_bits(expected, contents(*net)));
}

TEST(Engine, LoadsIntoAnotherProcessesModelWithoutStates) {
  TempDir dir;
  auto path = dir.path() + "/saved";
  std::vector<torch::Tensor> expected;
  {
    Engine engine(on_nvme(dir.path()));
    Net net = make_net(&engine);
    AdamW optimizer(net->parameters());
    train(net, optimizer, 2);
    engine.save(path);
    train(net, optimizer, 2);
    expected = contents(*net);
  }
  Engine engine;  // other budgets
  Net net = make_net(&engine);
  AdamW optimizer(net->parameters());
  engine.load(path);
  train(net, optimizer, 2);
  EXPECT_TRUE(same_bits(expected, contents(*net)));
}

// Turns a bit of the content's last place in a file.
void damage(const std::string& path, const torch::Tensor& content) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  std::string all((std::istreambuf_iterator<char>(file)), {});
  std::string part(static_cast<const char*>(content.const_data_ptr()),
                   content.nbytes());
  std::size_t at = all.rfind(part);
  ASSERT_NE(at, std::string::npos);
  file.clear();
  file.seekp(static_cast<std::streamoff>(at));
  file.put(static_cast<char>(all[at] ^ 1));
}

TEST(Engine, ALoadThatFailsHalfWayLeavesAModelThatThrows) {
  TempDir dir;
  Engine engine(on_nvme(dir.path()));
  Net net = make_net(&engine);
  AdamW optimizer(net->parameters());
  train(net, optimizer, 2);
  engine.save(dir.path() + "/damaged");
  engine.save(dir.path() + "/good");
  train(net, optimizer, 1);
  auto expected = contents(*net);
  engine.load(dir.path() + "/good");
  damage(dir.path() + "/damaged/volume.zinf",
         net->second->weight.detach().clone());

  EXPECT_TRUE(says(error_of([&] { engine.load(dir.path() + "/damaged"); }),
                   "checksum"));
  std::string unfinished = "damaged\") was not finished";
  EXPECT_TRUE(says(error_of([&] { backward(net); }), unfinished));
  EXPECT_TRUE(says(error_of([&] { optimizer.step(); }), unfinished));
  engine.load(dir.path() + "/good");
  train(net, optimizer, 1);
  EXPECT_TRUE(same_bits(contents(*net), expected));
}

TEST(Engine, LoadsWeightsAlone) {
  TempDir dir;
  Engine engine;
  Net net = make_net(&engine);
  engine.save(dir.path() + "/saved");
  auto expected = contents(*net);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  train(net, optimizer, 2);
  auto state = at::detail::getDefaultCPUGenerator().get_state();
  engine.load(dir.path() + "/saved", {.only = "weights"});
  EXPECT_TRUE(same_bits(expected, contents(*net)));
  EXPECT_TRUE(
      torch::equal(state, at::detail::getDefaultCPUGenerator().get_state()));
  EXPECT_TRUE(says(
      error_of([&] { engine.load(dir.path() + "/saved", {.only = "all"}); }),
      "only is \"all\""));
}

TEST(Engine, SaveAndLoadRefuseWithTheReason) {
  TempDir dir;
  auto path = dir.path() + "/saved";
  Engine empty;
  EXPECT_TRUE(says(error_of([&] { empty.save(path); }), "adopt(model)"));
  Engine engine;
  Net net = make_net(&engine);
  EXPECT_TRUE(says(error_of([&] { engine.load(path); }), "does not exist"));
  EXPECT_TRUE(
      says(error_of([&] { engine.load(dir.path()); }), "no volume.zinf"));
  EXPECT_TRUE(says(
      error_of([&] { engine.save(path, c10::IValue(c10::Device("cpu"))); }),
      "save: extra is of type Device"));
  engine.save(path);

  AdamW optimizer(net->parameters());
  EXPECT_TRUE(says(error_of([&] { engine.load(path); }),
                   "saved with 0 optimizers, there are 1"));
  Engine other;
  Net wide(48);
  other.adopt(wide);
  EXPECT_TRUE(says(error_of([&] { other.load(path); }), "first.weight"));
}

}  // namespace
}  // namespace zinf
