// What is fuzzed: the readers of everything that a store finds on a disk.
//
// Each target takes any bytes, must not crash nor allocate more than a small
// multiple of them, and what it accepts must survive being written again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zinf::tier {

using Bytes = std::vector<std::byte>;

struct FuzzTarget {
  std::string name;
  bool (*run)(std::span<const std::byte> data);  // whether it was accepted
  std::vector<Bytes> (*seeds)();                 // made by the writers
};

const std::vector<FuzzTarget>& fuzz_targets();

}  // namespace zinf::tier
