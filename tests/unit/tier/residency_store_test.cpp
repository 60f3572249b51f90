// The machine of states in flight above real stores: commits, random use, many
// threads, a disk that fails.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/ok.h"
#include "tests/support/state_spec.h"
#include "zinf/memory_disk.h"
#include "zinf/residency.h"

namespace zinf {
namespace {

constexpr std::size_t kBytes = kStateBytes;

// A store on a disk in memory, host memory above it, and a device above that
// when asked for.
class Tiers {
 public:
  Tiers(std::shared_ptr<io::MemoryDisk> disk, Durability durability,
        std::size_t host_states, std::size_t device_states,
        std::vector<io::Fault> faults = {})
      : budget_(ok(Budget::create("host", host_states * kBytes))),
        device_budget_(ok(Budget::create(
            "device", std::max<std::size_t>(device_states, 1) * kBytes))),
        pool_(ok(SlabPool::create({.budget = &budget_}))),
        device_pool_(ok(SlabPool::create({.budget = &device_budget_}))) {
    StoreOptions options;
    options.paths = {{.path = "run"}};
    options.durability = durability;
    options.state_bytes = 64 * kBytes;
    options.num_states = 64;
    options.block_bytes = 4096;
    options.io = {.backend = io::Backend::kMemory,
                  .faults = std::move(faults),
                  .disk = disk,
                  .block_bytes = 4096,
                  .depth = 4};
    auto made = disk->exists("run/volume.zinf") ? Store::open(options)
                                                : Store::create(options);
    EXPECT_TRUE(made.ok()) << made.status().text();
    store_ = std::move(made).value();
    host_ = std::make_unique<Residency>(
        ResidencyOptions{.allocate = slab_memory(pool_),
                         .backing = store_backing(*store_),
                         .leaving = nullptr});
    if (device_states == 0) return;
    auto copy = [](std::span<std::byte> to, std::span<const std::byte> from) {
      std::copy(from.begin(), from.end(), to.begin());
      return Status();
    };
    device_ = std::make_unique<Residency>(
        ResidencyOptions{.allocate = slab_memory(device_pool_),
                         .backing = host_backing(*host_, {copy, copy}),
                         .leaving = nullptr});
  }

  Residency& top() { return device_ != nullptr ? *device_ : *host_; }
  Residency& host() { return *host_; }
  const Budget& budget() const { return budget_; }

 private:
  Budget budget_;
  Budget device_budget_;
  SlabPool pool_;
  SlabPool device_pool_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Residency> host_;
  std::unique_ptr<Residency> device_;
};

void fill(Residency& states, StateRef ref, int value) {
  Result<Pin> pin = states.pin(ref, Use::kReplace);
  ASSERT_TRUE(pin.ok()) << pin.status().text();
  std::memset(pin->bytes().data(), value, pin->bytes().size());
}

int value_of(Residency& states, StateRef ref) {
  Result<Pin> pin = states.pin(ref, Use::kRead);
  if (!pin.ok()) {
    return pin.status().code() == Code::kNotFound ? -1 : -2;
  }
  auto bytes = pin->bytes();
  bool uniform = std::ranges::all_of(
      bytes, [&](std::byte byte) { return byte == bytes[0]; });
  return uniform ? static_cast<int>(bytes[0]) : -3;
}

class DurabilityTest : public testing::TestWithParam<std::uint64_t> {};

// Ten steps change a state that lives in host memory only; then the process is
// gone. The store has it as of the last step that the policy committed.
TEST_P(DurabilityTest, HostStatesTakePartInCommitsByThePolicy) {
  std::uint64_t every = GetParam();
  auto disk = std::make_shared<io::MemoryDisk>();
  {
    Tiers tiers(disk, Durability::every_k(every), 4, 0);
    StateRef ref = ok(tiers.host().add(weight_spec("a"), Home::kMemory));
    for (int step = 1; step <= 10; ++step) {
      fill(tiers.host(), ref, step);
      ASSERT_TRUE(tiers.host().end_step(step).ok());
    }
  }
  Tiers tiers(disk, Durability::every_k(every), 4, 0);
  StateRef ref = ok(tiers.host().add(weight_spec("a"), Home::kMemory));
  int wanted = every == 0 ? -1 : static_cast<int>(10 / every * every);
  EXPECT_EQ(value_of(tiers.host(), ref), wanted);
}

INSTANTIATE_TEST_SUITE_P(Policies, DurabilityTest, testing::Values(0, 1, 3, 7));

// Random use against a map, with one tier of memory and with two, always with
// less memory than states.
void random_use(std::size_t host_states, std::size_t device_states) {
  auto disk = std::make_shared<io::MemoryDisk>();
  auto tiers = std::make_unique<Tiers>(disk, Durability::every_step(),
                                       host_states, device_states);
  std::map<int, StateRef> refs;
  std::map<int, int> working;
  std::map<int, int> committed;
  auto reopen = [&] {
    tiers.reset();
    tiers = std::make_unique<Tiers>(disk, Durability::every_step(), host_states,
                                    device_states);
    refs.clear();
    working = committed;
  };
  auto ref_of = [&](int unit) {
    auto found = refs.find(unit);
    if (found != refs.end()) return found->second;
    Result<StateRef> ref =
        tiers->top().add(weight_spec(std::to_string(unit)), Home::kBelow);
    RC_ASSERT(ref.ok());
    return refs[unit] = *ref;
  };
  auto steps = *rc::gen::container<std::vector<std::pair<int, int>>>(
      rc::gen::pair(rc::gen::inRange(0, 16), rc::gen::inRange(0, 10)));
  int value = 0;
  for (auto [action, unit] : steps) {
    Residency& top = tiers->top();
    if (action < 5) {
      fill(top, ref_of(unit), value = (value + 1) % 200);
      working[unit] = value;
    } else if (action < 10) {
      int wanted = working.contains(unit) ? working[unit] : -1;
      RC_ASSERT(value_of(top, ref_of(unit)) == wanted);
    } else if (action == 10) {
      top.evict(ref_of(unit));
    } else if (action == 11) {
      top.prefetch(ref_of(unit));
    } else if (action == 12) {
      (void)tiers->host().make_room(unit * kBytes);
    } else if (action == 13) {
      RC_ASSERT(top.commit(1).ok());
      committed = working;
    } else if (action == 14) {
      RC_ASSERT(top.rollback().ok());
      working = committed;
    } else {
      reopen();
    }
    RC_ASSERT(tiers->budget().usage().total.used_bytes <= host_states * kBytes);
  }
  for (int unit = 0; unit < 10; ++unit) {
    int wanted = working.contains(unit) ? working[unit] : -1;
    RC_ASSERT(value_of(tiers->top(), ref_of(unit)) == wanted);
  }
}

RC_GTEST_PROP(ResidencyModelTest, HostAboveNvme, ()) { random_use(3, 0); }
RC_GTEST_PROP(ResidencyModelTest, DeviceAboveHostAboveNvme, ()) {
  random_use(2, 3);
}

// Four threads change, read, evict and prefetch twelve states in memory for
// six. A state holds the number of its changes in every word.
TEST(ResidencyThreadsTest, ManyThreadsSeeWholeStates) {
  Tiers tiers(std::make_shared<io::MemoryDisk>(), Durability::on_save(), 6, 0);
  Residency& host = tiers.host();
  constexpr int kStates = 12;
  std::vector<StateRef> refs;
  for (int i = 0; i < kStates; ++i) {
    refs.push_back(ok(host.add(weight_spec(std::to_string(i)), Home::kBelow)));
    fill(host, refs.back(), 0);
  }
  std::array<std::mutex, kStates> content;  // users exclude each other
  std::array<int, kStates> changes{};
  auto work = [&](unsigned seed) {
    for (int i = 0; i < 400; ++i) {
      seed = seed * 1664525 + 1013904223;
      int unit = static_cast<int>(seed >> 8) % kStates;
      unsigned action = (seed >> 4) % 8;
      if (action == 0) host.evict(refs[unit]);
      if (action == 1) host.prefetch(refs[unit]);
      if (action == 2) (void)host.make_room(kBytes);
      if (action < 3) continue;
      std::lock_guard lock(content[unit]);
      if (action < 5) {
        fill(host, refs[unit], ++changes[unit] % 200);
      } else {
        ASSERT_EQ(value_of(host, refs[unit]), changes[unit] % 200);
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) threads.emplace_back(work, i * 77 + 1);
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(host.commit(1).ok());
  for (int i = 0; i < kStates; ++i) {
    EXPECT_EQ(value_of(host, refs[i]), changes[i] % 200);
  }
  EXPECT_LE(tiers.budget().usage().total.high_bytes, 6 * kBytes);
}

// The whole stack: the disk fails under an eviction; the error names the state
// and the file, and the last commit can be had back.
TEST(ResidencyFaultTest, AFailedEvictionNamesItsCauseAndRollsBack) {
  auto disk = std::make_shared<io::MemoryDisk>();
  {
    Tiers tiers(disk, Durability::on_save(), 2, 0);
    StateRef ref = ok(tiers.host().add(weight_spec("a"), Home::kBelow));
    fill(tiers.host(), ref, 1);
    ASSERT_TRUE(tiers.host().commit(1).ok());
  }
  io::Fault fault{.on = io::Operation::kWrite, .nth = 1};
  Tiers tiers(disk, Durability::on_save(), 2, 0, {fault});
  StateRef ref = ok(tiers.host().add(weight_spec("a"), Home::kBelow));
  fill(tiers.host(), ref, 2);
  tiers.host().evict(ref);
  (void)tiers.host().make_room(kBytes);
  Status status = tiers.host().pin(ref, Use::kRead).status();
  EXPECT_EQ(status.code(), Code::kIo) << status.text();
  for (const char* word : {"a/weight", "run/volume", "EIO"}) {
    EXPECT_NE(status.text().find(word), std::string::npos) << status.text();
  }
  tiers.host().rename(ref, "layers.0");  // the error is told with the new name
  status = tiers.host().pin(ref, Use::kRead).status();
  EXPECT_TRUE(status.text().starts_with("layers.0/weight: ")) << status.text();
  EXPECT_FALSE(tiers.host().commit(2).ok());
  ASSERT_TRUE(tiers.host().rollback().ok());
  EXPECT_EQ(value_of(tiers.host(), ref), 1);
}

}  // namespace
}  // namespace zinf
