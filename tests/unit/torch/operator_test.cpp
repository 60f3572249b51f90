// Operators of others, in C++.
#include <gtest/gtest.h>
#include <torch/library.h>

#include "tests/support/temp_dir.h"
#include "tests/unit/torch/training.h"

namespace zinf {
namespace {

// Writes what its schema declares as read.
torch::Tensor add_one(const torch::Tensor& x) {
  auto* values = x.data_ptr<float>();
  for (std::int64_t i = 0; i < x.numel(); ++i) values[i] += 1;
  return torch::zeros({1});
}

// Asks for a mutable pointer, and only reads.
torch::Tensor sum(const torch::Tensor& x) {
  const auto* values = x.data_ptr<float>();
  double total = 0;
  for (std::int64_t i = 0; i < x.numel(); ++i) total += values[i];
  return torch::scalar_tensor(total);
}

torch::Tensor call(const char* name, const torch::Tensor& x) {
  torch::NoGradGuard no_grad;
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<torch::Tensor(const torch::Tensor&)>()
      .call(x);
}

EngineOptions unaudited(const std::string& path) {
  EngineOptions options = on_nvme(path);
  options.audit = false;
  return options;
}

TEST(Operator, KeepsWhatItWritesWithoutDeclaringIt) {
  TempDir dir;
  Net plain = make_net();
  Engine engine(unaudited(dir.path()));
  Net net = make_net(&engine);
  for (Net& each : {std::ref(plain), std::ref(net)}) {
    call("zinf_test::add_one", each->first->weight);
    call("zinf_test::add_one", each->second->weight.t());
  }
  EXPECT_EQ(engine.stats().resident_bytes, 0);
  EXPECT_TRUE(same_bits(contents(*plain), contents(*net)));
}

TEST(Operator, ThatOnlyReadsWritesNothingToNvme) {
  TempDir dir;
  Engine engine(unaudited(dir.path()));
  Net net = make_net(&engine);
  torch::Tensor expected = call("zinf_test::sum", net->first->weight);
  std::uint64_t writes = engine.stats().writes;
  EXPECT_TRUE(
      torch::equal(call("zinf_test::sum", net->first->weight), expected));
  EXPECT_EQ(engine.stats().writes, writes);
  EXPECT_EQ(engine.stats().escapes, 0);
}

TORCH_LIBRARY(zinf_test, library) {
  library.def("add_one(Tensor x) -> Tensor");
  library.def("sum(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(zinf_test, CPU, library) {
  library.impl("add_one", add_one);
  library.impl("sum", sum);
}

}  // namespace
}  // namespace zinf
