// Trains a small GPT on the bytes of a text twice: in memory, and with
// everything on NVMe, leaving memory after each use. Prints the losses and a
// hash of the weights of both; the exit code is 1 when they differ.
//
//   train_gpt TEXT NVME_DIRECTORY [STEPS]
//
// The model and the loop are plain libtorch.
#include <torch/torch.h>
#include <zinf/zinf.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <vector>

#include "gpt.h"

namespace {

using torch::Tensor;

struct Run {
  std::vector<double> losses;
  std::uint64_t hash = 0;
};

Run train(const char* name, const Tensor& text, int steps,
          zinf::Engine* engine) {
  torch::manual_seed(0);
  gpt::Gpt model = nullptr;
  if (engine != nullptr) {
    auto init = engine->init();
    model = gpt::Gpt();
  } else {
    model = gpt::Gpt();
  }
  if (engine != nullptr) engine->adopt(model);
  zinf::AdamW optimizer(
      model->parameters(),
      zinf::AdamWOptions(1e-3).weight_decay(0.1).max_grad_norm(1.0));

  Run run;
  for (int step = 1; step <= steps; ++step) {
    Tensor starts =
        torch::randint(text.size(0) - gpt::kLength - 1, {gpt::kBatch, 1});
    Tensor loss = gpt::loss_of(model, text, starts);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    run.losses.push_back(loss.item<double>());
    std::printf("%s: step %d of %d, loss %.6f\n", name, step, steps,
                run.losses.back());
    std::fflush(stdout);
  }
  run.hash = gpt::hash_of(*model);
  std::printf("%s: weights %016llx\n", name,
              static_cast<unsigned long long>(run.hash));
  return run;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: train_gpt TEXT NVME_DIRECTORY [STEPS]\n");
    return 2;
  }
  int steps = argc > 3 ? std::atoi(argv[3]) : 5;
  std::optional<Tensor> text = gpt::read_bytes(argv[1]);
  if (!text) {
    std::fprintf(stderr, "train_gpt: %s is no text of some length\n", argv[1]);
    return 2;
  }
  try {
    Run plain = train("memory", *text, steps, nullptr);
    zinf::Engine engine({.nvme = argv[2],
                         .weights = "nvme",
                         .states = "nvme",
                         .evict = "always"});
    Run nvme = train("nvme", *text, steps, &engine);
    zinf::EngineStats stats = engine.stats();
    std::printf(
        "nvme: %.1f MB read, %.1f MB written, at most %.1f MB resident\n",
        stats.bytes_read / 1e6, stats.bytes_written / 1e6,
        stats.peak_resident_bytes / 1e6);
    bool equal = plain.losses == nvme.losses && plain.hash == nvme.hash;
    std::printf("losses and weights are %s\n", equal ? "equal" : "NOT equal");
    return equal ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
  }
}
