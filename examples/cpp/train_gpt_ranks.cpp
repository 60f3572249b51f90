// Trains a small GPT on the bytes of a text by several processes: weights,
// gradients and states are split over them, and everything is on NVMe.
//
//   mpirun -np 2 train_gpt_ranks TEXT NVME_DIRECTORY [STEPS]
//
// The model and the loop are those of one process, except that each rank takes
// its own rows of every batch.
#include <torch/torch.h>
#include <zinf/mpi_comm.h>
#include <zinf/zinf.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>

#include "gpt.h"

namespace {

using torch::Tensor;

void train(zinf::Engine& engine, const Tensor& text, int steps) {
  gpt::Gpt model = nullptr;
  {
    auto init = engine.init();  // with rank 0's random numbers
    model = gpt::Gpt();
  }
  engine.adopt(model);
  zinf::AdamW optimizer(
      model->parameters(),
      zinf::AdamWOptions(1e-3).weight_decay(0.1).max_grad_norm(1.0));

  for (int step = 1; step <= steps; ++step) {
    torch::manual_seed(step);  // all ranks draw the same batch
    Tensor starts =
        torch::randint(text.size(0) - gpt::kLength - 1, {gpt::kBatch, 1});
    Tensor mine = starts.slice(0, engine.rank(), gpt::kBatch, engine.ranks());
    Tensor loss = gpt::loss_of(model, text, mine);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (engine.rank() != 0) continue;
    std::printf("step %d of %d, loss of rank 0: %.6f\n", step, steps,
                loss.item<double>());
    std::fflush(stdout);
  }
  auto hash = static_cast<unsigned long long>(gpt::hash_of(*model));
  zinf::EngineStats stats = engine.stats();
  if (engine.rank() != 0) return;
  std::printf("weights %016llx\n", hash);
  std::printf(
      "rank 0 of %d: %.1f MB of weights received, %.1f MB of gradients sent, "
      "%.1f MB read from NVMe\n",
      engine.ranks(), stats.weights_bytes_received / 1e6,
      stats.grads_bytes_sent / 1e6, stats.bytes_read / 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr,
                 "usage: mpirun -np RANKS train_gpt_ranks TEXT NVME_DIRECTORY "
                 "[STEPS]\n");
    return 2;
  }
  int steps = argc > 3 ? std::atoi(argv[3]) : 5;
  auto group = zinf::make_mpi_group();
  if (!group.ok()) {
    std::fprintf(stderr, "train_gpt_ranks: %s\n",
                 group.status().text().c_str());
    return 1;
  }
  std::shared_ptr<zinf::Comm> comm = std::move(*group);
  std::optional<Tensor> text = gpt::read_bytes(argv[1]);
  if (!text || comm->size() > gpt::kBatch) {
    std::fprintf(stderr,
                 "train_gpt_ranks: takes a text of some length (%s) and at "
                 "most %d ranks\n",
                 argv[1], gpt::kBatch);
    return 2;
  }
  try {
    zinf::Engine engine(
        {.nvme = argv[2], .weights = "nvme", .states = "nvme", .comm = comm});
    torch::manual_seed(0);
    train(engine, *text, steps);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt_ranks: rank %d: %s\n", comm->rank(),
                 error.what());
    return 1;
  }
}
