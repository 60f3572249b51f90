// Tensors to and from a store on disk: what engine.save and engine.load use.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/tier/new_directory.h"
#include "zinf/status.h"
#include "zinf/store.h"

namespace zinf {

class SplitMaster;

struct NamedTensor {
  std::string unit;   // "transformer.h.0.mlp.weight"
  std::string state;  // "weight", "buffer", "exp_avg", ...
  at::Tensor tensor;
  // Not the tensor itself is meant, but its master, in float32.
  std::shared_ptr<SplitMaster> split = nullptr;
};

// Writes a store with one version, named "checkpoint", to a directory that does
// not exist yet. It appears under its name when it is whole and on the disk; on
// failure nothing is left. Tensors are brought into memory one at a time.
Status save_tensors(const std::string& path,
                    const std::vector<NamedTensor>& tensors, std::uint64_t step,
                    const std::string& extra);

// Tensors in a store as save_tensors() makes it, on the disk and without a name
// yet: of ranks each writes its own before the first gets its name. Gone with
// this, unless it was linked.
class WrittenTensors {
 public:
  // `parent` is the directory that the directory of all will be in.
  static Result<std::unique_ptr<WrittenTensors>> write(
      const std::string& parent, const std::vector<NamedTensor>& tensors,
      std::uint64_t step, const std::string& extra);

  // Gives it its directory: see Store::link().
  Status link(const std::string& path) { return store_->link(path); }

 private:
  WrittenTensors() = default;
  std::unique_ptr<Store> store_;
};

// What save_tensors() wrote. One thread.
class TensorReader {
 public:
  static Result<std::unique_ptr<TensorReader>> open(const std::string& path);

  std::uint64_t step() const { return step_; }
  Result<std::string> extra();
  const std::vector<StateSpec>& states() const { return states_; }

  // kInvalid when there is none of that name, type and shape, with both sides'.
  Status check(const NamedTensor& tensor) const;
  // Reads into the tensor, wherever it lives. Checksums are compared.
  Status read(const NamedTensor& tensor);

 private:
  TensorReader() = default;
  const StateSpec* find(const std::string& unit,
                        const std::string& state) const;

  std::string path_;
  std::unique_ptr<Store> store_;
  std::uint64_t step_ = 0;
  std::vector<StateSpec> states_;
};

}  // namespace zinf
