// A device's tier above the host's: copies in the background.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/base/task_thread.h"
#include "tests/support/ok.h"
#include "tests/support/state_spec.h"
#include "zinf/memory_disk.h"
#include "zinf/residency.h"

namespace zinf {
namespace {

TEST(TaskThread, DoesTasksInOrderAndAllOfThemBeforeItsEnd) {
  std::vector<int> seen;
  {
    TaskThread thread;
    for (int i = 0; i < 50; ++i) thread.add([&, i] { seen.push_back(i); });
  }
  ASSERT_EQ(seen.size(), 50u);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(seen[static_cast<std::size_t>(i)], i);
}

constexpr std::size_t kBytes = kStateBytes;

Status copy(std::span<std::byte> to, std::span<const std::byte> from) {
  std::memcpy(to.data(), from.data(), to.size());
  return {};
}

std::unique_ptr<Store> store_on(std::shared_ptr<io::MemoryDisk> disk) {
  StoreOptions options;
  options.paths = {{.path = "run"}};
  options.state_bytes = 64 * kBytes;
  options.num_states = 64;
  options.block_bytes = 4096;
  options.io = {.backend = io::Backend::kMemory,
                .disk = std::move(disk),
                .block_bytes = 4096,
                .depth = 4};
  return ok(Store::create(options));
}

// A read ahead for which the host has no room is no failure of the state.
TEST(HostBacking, WhatTheHostRefusedAheadIsReadWhenItIsNeeded) {
  auto store = store_on(std::make_shared<io::MemoryDisk>());
  Budget host_budget = ok(Budget::create("host", kBytes));
  Budget device_budget = ok(Budget::create("device", kBytes));
  SlabPool host_pool = ok(SlabPool::create({.budget = &host_budget}));
  SlabPool device_pool = ok(SlabPool::create({.budget = &device_budget}));
  Residency host(
      {.allocate = slab_memory(host_pool), .backing = store_backing(*store)});
  Residency device({.allocate = slab_memory(device_pool),
                    .backing = host_backing(host, {copy, copy})});
  StateRef a = ok(device.add(weight_spec("a"), Home::kBelow));
  StateRef b = ok(device.add(weight_spec("b"), Home::kBelow));
  for (StateRef state : {a, b}) {
    Pin pin = ok(device.pin(state, Use::kReplace));
    std::memset(pin.bytes().data(), static_cast<int>(state.index + 1), kBytes);
  }
  ASSERT_TRUE(device.flush().ok());
  device.make_room(2 * kBytes);
  StateRef other = ok(host.add(weight_spec("other"), Home::kBelow));
  {
    Pin taken = ok(host.pin(other, Use::kReplace));  // all that the host has
    device.prefetch(a);
    EXPECT_EQ(device.place(a), Place::kReading);
    EXPECT_EQ(device.make_room(kBytes), kBytes);
    EXPECT_EQ(device.place(a), Place::kAbsent);
    EXPECT_EQ(device.pin(a, Use::kRead).status().code(), Code::kOverBudget);
  }
  Pin pin = ok(device.pin(b, Use::kRead));
  EXPECT_EQ(pin.bytes()[0], std::byte{2});
}

// New content for which the host has no room stays where it is.
TEST(HostBacking, WhatTheHostRefusedToTakeIsTakenLater) {
  Budget host_budget = ok(Budget::create("host", kBytes));
  Budget device_budget = ok(Budget::create("device", kBytes));
  SlabPool host_pool = ok(SlabPool::create({.budget = &host_budget}));
  SlabPool device_pool = ok(SlabPool::create({.budget = &device_budget}));
  Residency host({.allocate = slab_memory(host_pool), .backing = nullptr});
  Residency device({.allocate = slab_memory(device_pool),
                    .backing = host_backing(host, {copy, copy})});
  StateRef state = ok(device.add(weight_spec("a"), Home::kBelow));
  {
    Pin pin = ok(device.pin(state, Use::kReplace));
    std::memset(pin.bytes().data(), 5, kBytes);
  }
  StateRef other = ok(host.add(weight_spec("other"), Home::kMemory));
  (void)ok(host.pin(other, Use::kReplace));  // all that the host has
  EXPECT_EQ(device.leave(state).code(), Code::kOverBudget);
  EXPECT_EQ(device.place(state), Place::kDirty);
  EXPECT_EQ(ok(device.pin(state, Use::kRead)).bytes()[0], std::byte{5});
  host.remove(other);
  EXPECT_TRUE(device.leave(state).ok());
  EXPECT_EQ(ok(device.pin(state, Use::kRead)).bytes()[0], std::byte{5});
}

// What the wholes of ranks have is not the host's own, and goes on from there.
TEST(HostBacking, AWholeIsKeptAmongTheWholes) {
  auto store = store_on(std::make_shared<io::MemoryDisk>());
  auto slices = store_on(std::make_shared<io::MemoryDisk>());
  Budget budget = ok(Budget::create("memory", 8 * kBytes));
  SlabPool pool = ok(SlabPool::create({.budget = &budget}));
  Residency host(
      {.allocate = slab_memory(pool), .backing = store_backing(*store)});
  Residency wholes(
      {.allocate = slab_memory(pool), .backing = store_backing(*slices)});
  StateRef whole = ok(wholes.add(weight_spec("a"), Home::kBelow));
  auto add = [&](const StateSpec&) -> Result<HostState> {
    return HostState{.state = whole, .whole = true};
  };
  Residency device({.allocate = slab_memory(pool),
                    .backing = host_backing(host, {copy, copy}, add, &wholes)});
  StateRef state = ok(device.add(weight_spec("a"), Home::kBelow));
  {
    Pin pin = ok(device.pin(state, Use::kReplace));
    std::memset(pin.bytes().data(), 7, kBytes);
  }
  ASSERT_TRUE(device.leave(state).ok());
  EXPECT_EQ(wholes.stats().writes, 1u) << "at once";
  EXPECT_EQ(host.stats().num_states, 0u);
  EXPECT_EQ(ok(device.pin(state, Use::kRead)).bytes()[0], std::byte{7});
  device.remove(state);
  EXPECT_EQ(wholes.stats().num_states, 1u) << "somebody else removes it";
}

}  // namespace
}  // namespace zinf
