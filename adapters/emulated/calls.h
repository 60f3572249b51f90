// What kernels gave back, so that it is known before they run again.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "adapters/emulated/cpu_aliases.h"
#include "src/base/mutex.h"

namespace zinf::emulated {

// One tensor that a kernel returns.
struct Output {
  enum class Kind : std::uint8_t { kUndefined, kArgument, kNew };
  Kind kind = Kind::kUndefined;
  std::size_t index = 0;  // of the argument, or of the new storage
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<std::int64_t> sizes = {};
  std::vector<std::int64_t> strides = {};
  std::int64_t offset = 0;
};

// All that a kernel returns.
struct Outputs {
  // False: what it does shows only when it has run. The rest means nothing
  // then.
  bool known = false;
  std::vector<Output> tensors;       // of lists too, in order
  std::vector<std::size_t> lengths;  // per result: of a list; kNoList: a tensor
  std::vector<std::size_t> storages;  // bytes of the new ones

  static constexpr std::size_t kNoList = SIZE_MAX;
};

// After a kernel's run, before write_back().
Outputs describe(const CpuAliases& aliases,
                 std::span<const c10::IValue> results);

// The new storages of another run; none when it returned other shapes.
std::optional<std::vector<c10::Storage>> new_storages(
    const Outputs& expected, std::span<const c10::IValue> results);

// Everything of a call that shapes depend on, empty when that is not known.
// Numbers with a fraction do not count: they change from step to step.
std::string shape_key(const CpuAliases& aliases, const std::string& name,
                      std::span<const c10::IValue> arguments);

// Thread-safe.
class KnownCalls {
 public:
  // Null when there was no such call.
  std::shared_ptr<const Outputs> find(const std::string& key) const
      ZINF_EXCLUDES(mutex_);
  void add(const std::string& key, Outputs outputs) ZINF_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Outputs>> calls_
      ZINF_GUARDED_BY(mutex_);
};

}  // namespace zinf::emulated
