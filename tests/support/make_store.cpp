// Makes a store for tests of the command:
//
//   make_store [--steps N] [--keep NAME] [--hold] DIRECTORY...
//
// Commits N steps of two states. --hold: says "held" and keeps the store open
// until standard input ends.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "src/base/align.h"
#include "tests/support/buffer.h"
#include "zinf/store.h"

namespace zinf {
namespace {

Status make(int argc, char** argv) {
  StoreOptions options;
  std::uint64_t steps = 2;
  std::string keep;
  bool hold = false;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word == "--steps" && i + 1 < argc) {
      steps = std::strtoull(argv[++i], nullptr, 10);
    } else if (word == "--keep" && i + 1 < argc) {
      keep = argv[++i];
    } else if (word == "--hold") {
      hold = true;
    } else {
      options.paths.push_back({.path = word, .weight = 1});
    }
  }
  options.state_bytes = kMiB;
  options.num_states = 2;
  options.block_bytes = 64 * kKiB;
  ZINF_ASSIGN(auto store, Store::create(options));
  for (std::uint64_t step = 1; step <= steps; ++step) {
    for (std::string state : {"exp_avg", "exp_avg_sq"}) {
      ZINF_ASSIGN(StateId id, store->define({.unit = "fc.weight",
                                             .state = state,
                                             .dtype = "float32",
                                             .shape = {250, 500},
                                             .bytes = 500'000}));
      Buffer data(500'000, step);
      ZINF_TRY(store->put(id, data.span()).wait());
    }
    ZINF_TRY(store->commit(step));
  }
  if (!keep.empty()) ZINF_TRY(store->keep(keep));
  if (hold) {
    std::puts("held");
    std::fflush(stdout);
    while (std::getchar() != EOF) {
    }
  }
  return {};
}

}  // namespace
}  // namespace zinf

int main(int argc, char** argv) {
  zinf::Status status = zinf::make(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.text().c_str());
  return status.ok() ? 0 : 1;
}
