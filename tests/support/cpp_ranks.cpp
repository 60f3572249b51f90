// A rank of tests/python/test_cpp_ranks.py, started by mpirun: trains a small
// model and prints a hash of its weights.
//   cpp_ranks NVME|- STAGE DTYPE UPDATE MICRO_BATCHES NORM|- [WHAT]
// WHAT: "idle": rank 1 makes no backward pass; "other": it has another model;
// "throw": it stops half way; "save": all of them save; "groups", "world":
// partition_group = 2, deterministic = "world"; "options": it has another
// learning rate, and each rank says what two more steps throw; "states": each
// rank saves its optimizer, loads that, and then what rank 0 has saved.
#include <torch/torch.h>
#include <zinf/mpi_comm.h>
#include <zinf/zinf.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/model_hash.h"

namespace {

using Arguments = std::vector<std::string>;

zinf::AdamWOptions options_of(const Arguments& arguments) {
  zinf::AdamWOptions options(1e-2);
  options.update(arguments[3]).micro_batches(std::stoi(arguments[4]));
  if (arguments[5] != "-") options.max_grad_norm(std::stod(arguments[5]));
  return options;
}

// The same as that of test_cpp_ranks.py.
torch::nn::Sequential make_model(torch::ScalarType dtype, int width) {
  torch::nn::Sequential model;
  model->push_back(torch::nn::Linear(8, width));
  model->push_back(torch::nn::Tanh());
  model->push_back(torch::nn::Linear(width, 3));
  for (auto& tensor : model->parameters()) tensor.set_data(tensor.to(dtype));
  return model;
}

std::string thrown_by(const std::function<void()>& what) {
  try {
    what();
    return "nothing";
  } catch (const std::exception& error) {
    return error.what();
  }
}

void try_other_options(zinf::AdamW& optimizer, int rank) {
  auto& options = optimizer.param_groups()[0].options();
  if (rank == 1) options.set_lr(0.5);
  for (int i = 0; i < 2; ++i) {
    const std::string text = thrown_by([&] { optimizer.step(); });
    std::printf("rank %d, step %d: %s\n", rank, i, text.c_str());
  }
}

void try_states(zinf::AdamW& optimizer, int rank, const std::string& folder) {
  const auto path = [&](int of) {
    return folder + "/states-" + std::to_string(of);
  };
  torch::save(optimizer, path(rank));
  optimizer.step();  // all ranks have saved theirs
  for (int of : {rank, 0}) {
    const std::string text =
        thrown_by([&] { torch::load(optimizer, path(of)); });
    std::printf("rank %d, states of %d: %s\n", rank, of, text.c_str());
  }
}

void train(const Arguments& arguments, std::shared_ptr<zinf::Comm> comm) {
  constexpr int kSteps = 3;
  const int rank = comm->rank();
  const std::string what = arguments.size() > 6 ? arguments[6] : "";
  const bool is_odd_one = rank == 1;
  auto dtype = arguments[2] == "bfloat16" ? torch::kBFloat16 : torch::kFloat;
  const bool on_nvme = arguments[0] != "-";
  zinf::Engine engine(
      {.nvme = on_nvme ? zinf::Paths(arguments[0]) : zinf::Paths(),
       .weights = on_nvme ? "nvme" : "auto",
       .states = on_nvme ? "nvme" : "auto",
       .comm = std::move(comm),
       .stage = std::stoi(arguments[1]),
       .partition_group = what == "groups" ? 2 : 0,
       .deterministic = what == "world" ? "world" : "ranks"});
  torch::manual_seed(rank);  // rank 0's counts
  torch::nn::Sequential model = nullptr;
  {
    auto init = engine.init();
    model = make_model(dtype, is_odd_one && what == "other" ? 17 : 16);
  }
  engine.adopt(model);
  zinf::AdamWOptions options = options_of(arguments);
  zinf::AdamW optimizer(model->parameters(), options);
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < options.micro_batches(); ++micro) {
      torch::manual_seed(1000 + 100 * step + 10 * micro + rank);
      torch::Tensor x = torch::randn({16, 8}).to(dtype);
      if (is_odd_one && what == "idle") continue;
      if (is_odd_one && what == "throw") throw std::runtime_error("enough");
      model->forward(x).square().mean().backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  const std::uint64_t hash = zinf::hash_of(*model);
  std::printf("weights %016llx\n", static_cast<unsigned long long>(hash));
  if (what == "save") engine.save("nowhere");
  if (what == "options") try_other_options(optimizer, rank);
  if (what == "states") try_states(optimizer, rank, arguments[0]);
}

}  // namespace

int main(int argc, char** argv) {
  auto group = zinf::make_mpi_group();
  if (!group.ok()) {
    std::fprintf(stderr, "cpp_ranks: %s\n", group.status().text().c_str());
    return 1;
  }
  std::shared_ptr<zinf::Comm> comm = std::move(*group);
  const int rank = comm->rank();
  try {
    train(Arguments(argv + 1, argv + argc), std::move(comm));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
}
