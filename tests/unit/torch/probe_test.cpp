// engine.probe() in C++: the least host_memory of a step, and nothing is
// trained.
#include <gtest/gtest.h>

#include <sstream>

#include "adapters/torch/host_allocator.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/torch/training.h"

namespace zinf {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

torch::nn::Sequential make_model(Engine& engine) {
  torch::nn::Sequential model;
  {
    auto init = engine.init();
    for (int i = 0; i < 4; ++i) {  // 9 MiB each
      model->push_back(
          torch::nn::Linear(torch::nn::LinearOptions(1536, 1536).bias(false)));
    }
  }
  engine.adopt(model);
  return model;
}

void backward(torch::nn::Sequential& model) {
  model->forward(torch::ones({1024, 1536})).square().mean().backward();
}

// What the process's tensors hold anyway.
std::uint64_t others() {
  process_memory()->trim();
  return process_memory()->budget().usage().total.used_bytes;
}

// Trains with so much beside that.
void train_within(const Paths& nvme, std::uint64_t bytes,
                  const AdamWOptions& options) {
  Engine engine({.host_memory = others() + bytes, .nvme = nvme});
  torch::nn::Sequential model = make_model(engine);
  AdamW optimizer(model->parameters(), options);
  for (int i = 0; i < 2; ++i) {
    backward(model);
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(Probe, TheLeastWorksAndLessDoesNot) {
  for (const char* update : {"step", "backward"}) {
    TempDir dir;
    AdamWOptions options = AdamWOptions(1e-2).update(update);
    Need need;
    {
      Engine engine({.host_memory = "1GiB", .nvme = dir.path()});
      torch::nn::Sequential model = make_model(engine);
      AdamW optimizer(model->parameters(), options);
      need = engine.probe([&] { backward(model); });
      EXPECT_TRUE(need.fits());
      EXPECT_EQ(need.limit_bytes, 1024 * kMiB);
    }
    std::uint64_t least = need.least_bytes - others();
    train_within(dir.path(), least, options);
    EXPECT_THROW(train_within(dir.path(), least - least / 5, options),
                 BudgetError);
  }
}

TEST(Probe, StatesThatStayCountBesideTheActivations) {
  Need need;
  {
    Engine engine({.host_memory = "1GiB"});
    torch::nn::Sequential model = make_model(engine);
    AdamW optimizer(model->parameters(), AdamWOptions(1e-2));
    need = engine.probe([&] { backward(model); });
  }
  std::uint64_t least = need.least_bytes - others();
  train_within({}, least, AdamWOptions(1e-2));
}

TEST(Probe, NothingIsTrained) {
  for (const char* update : {"step", "backward"}) {
    for (const char* weights : {"host", "nvme"}) {
      TempDir dir;
      Engine engine({.nvme = dir.path(), .weights = weights});
      Net net = make_net(&engine);
      AdamW optimizer(net->parameters(), AdamWOptions(1e-2).update(update));
      train(net, optimizer, 1);
      auto before = contents(*net);
      at::Generator random = at::detail::getDefaultCPUGenerator();
      torch::Tensor state = random.get_state();
      engine.probe([&] { train(net, optimizer, 1); });
      engine.probe([&] { backward(net); });
      EXPECT_TRUE(same_bits(contents(*net), before)) << update << weights;
      EXPECT_TRUE(torch::equal(random.get_state(), state));
      EXPECT_FALSE(net->first->weight.grad().defined());
      EXPECT_EQ(engine.stats().steps, 1);
      train(net, optimizer, 1);  // and goes on as if nothing had been
    }
  }
}

TEST(Probe, GradientsFromBeforeAreKept) {
  TempDir dir;
  Engine engine(on_nvme(dir.path()));
  Net net = make_net(&engine);
  AdamW optimizer(net->parameters());
  backward(net);
  torch::Tensor before = net->first->weight.grad().clone();
  engine.probe([&] { backward(net); });
  EXPECT_TRUE(torch::equal(net->first->weight.grad(), before));
}

TEST(Probe, SaysWhatItHasFound) {
  std::ostringstream text;
  text << Need{.least_bytes = 3 * kMiB, .limit_bytes = 2 * kMiB};
  EXPECT_EQ(text.str(),
            "the step needs host_memory of 3.0 MiB or more: it does not fit in "
            "2.0 MiB");
}

TEST(Probe, RefusesWithTheReason) {
  TempDir dir;
  Engine engine(on_nvme(dir.path()));
  Net net = make_net(&engine);
  AdamW optimizer(net->parameters(), AdamWOptions(1e-2).update("backward"));
  EXPECT_TRUE(says(error_of([&] { engine.probe(nullptr); }), "a function"));
  EXPECT_TRUE(
      says(error_of([&] { engine.probe([&] { engine.probe([] {}); }); }),
           "probe() inside probe()"));
  EXPECT_TRUE(says(error_of([&] {
                     engine.probe([&] {
                       torch::NoGradGuard no_grad;
                       net->first->weight.mul_(2);
                     });
                   }),
                   "has changed first.weight"));
  EXPECT_THROW(engine.probe([] { throw std::out_of_range("mine"); }),
               std::out_of_range);
  backward(net);
  EXPECT_TRUE(says(error_of([&] { engine.probe([] {}); }),
                   "between backward and step()"));
  optimizer.step();
  optimizer.zero_grad();
  train(net, optimizer, 1);
}

}  // namespace
}  // namespace zinf
