// A small store under test, and shorthands for what tests do with it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "src/base/align.h"
#include "tests/support/buffer.h"
#include "tests/support/temp_dir.h"
#include "zinf/memory_disk.h"
#include "zinf/store.h"

namespace zinf {

inline constexpr std::size_t kBlock = 64 * kKiB;

inline StateSpec spec(const std::string& unit, std::uint64_t bytes) {
  return {.unit = unit,
          .state = "exp_avg",
          .dtype = "float32",
          .shape = {bytes / 4},
          .bytes = bytes};
}

// On a disk in memory, or in a directory when `dir` is given.
class StoreTest : public testing::Test {
 protected:
  StoreOptions options() {
    StoreOptions options;
    options.paths = {{.path = "run"}};
    options.state_bytes = 2 * kMiB;
    options.num_states = 8;
    options.block_bytes = kBlock;
    options.io = {.backend = io::Backend::kMemory,
                  .disk = disk_,
                  .block_bytes = kBlock,
                  .depth = 4};
    return options;
  }
  StoreOptions on_disk() {
    StoreOptions with = options();
    with.paths = {{.path = dir_.file("run")}};
    with.io.backend = io::Backend::kAuto;
    return with;
  }

  static std::unique_ptr<Store> made(Result<std::unique_ptr<Store>> store) {
    EXPECT_TRUE(store.ok()) << store.status().text();
    return store.ok() ? std::move(store).value() : nullptr;
  }
  static StateId define(Store& store, const std::string& unit,
                        std::uint64_t bytes) {
    Result<StateId> id = store.define(spec(unit, bytes));
    EXPECT_TRUE(id.ok()) << id.status().text();
    return *id;
  }
  static Status put(Store& store, StateId id, std::uint64_t bytes,
                    std::uint64_t seed) {
    Buffer data(bytes, seed);
    return store.put(id, data.span()).wait();
  }
  static testing::AssertionResult holds(Store& store, StateId id,
                                        std::uint64_t bytes,
                                        std::uint64_t seed) {
    Buffer wanted(bytes, seed);
    Buffer got(bytes, seed + 1000);
    Status status = store.get(id, got.span()).wait();
    if (!status.ok()) return testing::AssertionFailure() << status.text();
    if (!(got == wanted)) return testing::AssertionFailure() << "other bytes";
    return testing::AssertionSuccess();
  }

  // Of the volume in a path of the disk in memory.
  std::uint64_t volume_bytes(const std::string& path) {
    auto io = io::Io::create({.backend = io::Backend::kMemory, .disk = disk_});
    return (*io)->open(path + "/volume.zinf", {})->bytes();
  }

  std::shared_ptr<io::MemoryDisk> disk_ = std::make_shared<io::MemoryDisk>();
  TempDir dir_;
};

}  // namespace zinf
