// The engine: where a model's parameters, gradients and optimizer states live.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zinf/comm.h"
#include "zinf/engine_stats.h"
#include "zinf/need.h"

namespace zinf {

class EngineImpl;

// A number of bytes, or a text such as "4GB" or "512MiB". Nothing: no limit.
class MemorySize {
 public:
  MemorySize() = default;
  // NOLINTBEGIN(google-explicit-constructor): they stand for values
  MemorySize(const char* text) : text_(text), given_(true) {}
  MemorySize(std::string text) : text_(std::move(text)), given_(true) {}
  template <std::integral Integer>
    requires(!std::same_as<Integer, bool>)
  MemorySize(Integer bytes) : MemorySize(std::to_string(bytes)) {}
  // NOLINTEND(google-explicit-constructor)

  bool given() const { return given_; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  bool given_ = false;
};

// A directory, or several.
class Paths {
 public:
  Paths() = default;
  // NOLINTBEGIN(google-explicit-constructor): they stand for values
  Paths(const char* path) : paths_{path} {}
  Paths(std::string path) : paths_{std::move(path)} {}
  Paths(std::vector<std::string> paths) : paths_(std::move(paths)) {}
  Paths(std::initializer_list<std::string> paths) : paths_(paths) {}
  // NOLINTEND(google-explicit-constructor)

  const std::vector<std::string>& paths() const { return paths_; }

 private:
  std::vector<std::string> paths_;
};

struct EngineOptions {
  // For states in host memory, and for units on the accelerator.
  MemorySize host_memory = {};
  MemorySize device_memory = {};
  // On a fast disk: in each a file without a name, gone with the process.
  // "PATH:500GB" takes no more than that; "{local_rank}" is LOCAL_RANK.
  Paths nvme = {};
  // Bytes that the drives behind it are rated for (TBW), together: "600TB".
  // Nothing: 0.3 of their file systems' size a day for 5 years.
  MemorySize nvme_endurance = {};
  // "auto": in memory while it fits, else on NVMe; "host"; "nvme". Gradients go
  // with weights.
  std::string weights = "auto";
  std::string states = "auto";
  std::string evict = "auto";  // "always": every unit leaves after each use
  bool audit = false;          // looks for missed accesses; slow, for tests
  // The other ranks, as make_mpi_group() gives them (zinf/mpi_comm.h); nothing:
  // this process alone. Budgets are per process. Its end is the engine's.
  std::shared_ptr<Comm> comm = {};
  // Where there are several, what is split over them: 1 the optimizer's states,
  // 2 gradients too, 3 weights too.
  int stage = 3;
  // So many ranks in a row have the whole model among them, and such groups are
  // replicas of each other; 0: it is split over all ranks.
  int partition_group = 0;
  // "ranks": the same bits for the same number of ranks. "world": for any power
  // of two of them; with update("backward"), without clipping, and where a
  // step's micro-batch i is the one of rank i mod N in its pass i div N, with
  // its loss divided by the number of passes.
  std::string deterministic = "ranks";
};

struct LoadOptions {
  // "weights": weights and buffers alone. Optimizers and random states stay as
  // they are, and need not be those that were saved.
  std::string only = {};
};

struct Loaded {
  std::uint64_t step = 0;
  c10::IValue extra;
};

// While it lives, on its thread, floating-point tensors go to their tier as
// they are created, with the same values as otherwise. At its end those that
// did not become leaves that require gradients are plain tensors again:
// parameters that are frozen at birth are taken by Engine::adopt().
class [[nodiscard]] Init {
 public:
  ~Init();
  Init(const Init&) = delete;
  Init& operator=(const Init&) = delete;

  void end();  // now; throws what the destructor can only log

 private:
  friend class Engine;
  explicit Init(std::shared_ptr<EngineImpl> impl);
  std::shared_ptr<EngineImpl> impl_;
};

// One at a time. Models are referred to weakly: they live as long as their
// owners want, before or after the engine. A model is a module that somebody
// holds by a shared_ptr or a holder (TORCH_MODULE), as torch itself wants it.
class Engine {
 public:
  // Throws what is wrong with the options.
  explicit Engine(const EngineOptions& options = {});
  // close(), but what does not fit in memory is lost, which a warning tells.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // auto init = engine.init();
  // Of several ranks all call it, and adopt(), in the same order: they get the
  // values that rank 0's generator gives, or rank 0's model.
  Init init();

  // Takes a model that exists, or names one that was born in init(): save() and
  // load() know adopted models. A parameter whose memory somebody else uses too
  // stays as it is until a later step finds it alone; of several ranks, until
  // adopt() does.
  void adopt(torch::nn::Module& model);
  template <typename T>
  void adopt(torch::nn::ModuleHolder<T>& model) {
    adopt(*model);
  }

  // Makes it a plain model again, in memory, with its gradients and optimizer
  // states. Throws when it does not fit; it is managed as before then.
  void release(torch::nn::Module& model);
  template <typename T>
  void release(torch::nn::ModuleHolder<T>& model) {
    release(*model);
  }

  // Gives everything back: models are plain models again, in the machine's
  // memory, whatever the budgets are, and the folders on NVMe are gone. Throws
  // a BudgetError when there is too little memory: the engine is open as
  // before.
  void close();
  // Without giving anything back: what was managed throws when it is touched.
  void close_and_discard();

  EngineStats stats() const;

  // The rank of this process, and how many there are. With several, probe(),
  // save() and load() throw so far.
  int rank() const;
  int ranks() const;

  // Runs a training step (forward and backward; the optimizer's step() may be
  // in it) and says the least host_memory with which it works. It may take more
  // than host_memory, if the machine has it. Nothing is trained: weights,
  // states, gradients, buffers and the CPU's random state are afterwards what
  // they were. Only zinf::AdamW is held back: a step that changes a weight
  // otherwise throws, and has changed it.
  Need probe(const std::function<void()>& step);

  // Writes weights, buffers, the states of zinf::AdamW, random states and
  // `extra` to a new directory, which Python's engine.load() reads too. `extra`
  // may hold tensors, numbers, texts, None, and lists, tuples and dictionaries
  // of these.
  void save(const std::string& path, const c10::IValue& extra = {});

  // Brings back what save(), or Python's, has written, into the same models and
  // optimizers. Another shape or a missing state is refused before anything
  // changes.
  Loaded load(const std::string& path, const LoadOptions& options = {});

 private:
  std::shared_ptr<EngineImpl> impl_;
};

}  // namespace zinf
