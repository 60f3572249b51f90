// What stays on a device, beside the offline optimum.
#include "src/engine/foresight.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "src/base/align.h"
#include "tests/support/ok.h"

namespace zinf {
namespace {

constexpr std::size_t kBytes = 4096;
constexpr int kSteps = 6;
using Uses = std::vector<std::uint32_t>;

Status copy(std::span<std::byte> to, std::span<const std::byte> from) {
  std::memcpy(to.data(), from.data(), to.size());
  return {};
}

// States above the host's memory, with room for some of them.
class Device {
 public:
  Device(std::uint32_t states, std::uint64_t room, std::uint64_t settling)
      : budget_(ok(Budget::create("device", room * kBytes))),
        pool_(ok(SlabPool::create({.budget = &budget_}))),
        host_budget_(ok(Budget::create("host", (states + 8) * kBytes))),
        host_pool_(ok(SlabPool::create({.budget = &host_budget_}))),
        host_({.allocate = slab_memory(host_pool_), .backing = nullptr}),
        residency_({.allocate = slab_memory(pool_),
                    .backing = host_backing(host_, {copy, copy})}),
        foresight_(residency_, settling * kBytes) {
    for (std::uint32_t i = 0; i < states; ++i) {
      StateSpec spec{.unit = std::to_string(i),
                     .state = "weight",
                     .dtype = "bytes",
                     .shape = {kBytes},
                     .bytes = kBytes};
      refs_.push_back(ok(residency_.add(spec, Home::kBelow)));
      const Pin pin = ok(residency_.pin(refs_.back(), Use::kReplace));
      std::memset(pin.bytes().data(), static_cast<int>(i), kBytes);
    }
    EXPECT_TRUE(residency_.flush().ok());
  }

  void use(std::uint32_t state, bool evaluates = false) {
    const StateUse use{refs_[state].index, UseKind::kRead};
    foresight_.use({&use, 1}, kBytes, evaluates);
    const Pin pin = ok(residency_.pin(refs_[state], Use::kRead));
    EXPECT_EQ(pin.bytes().back(), static_cast<std::byte>(state));
  }
  void end_step() { foresight_.end_step(); }
  std::uint64_t reads() const { return residency_.stats().reads; }

  // Reads of some steps after as many.
  std::uint64_t train(const Uses& step) {
    std::uint64_t before = 0;
    for (int i = 0; i < 2 * kSteps; ++i) {
      if (i == kSteps) before = reads();
      for (const std::uint32_t state : step) use(state);
      end_step();
    }
    return reads() - before;
  }
  std::uint64_t evaluate(const Uses& pass) {
    std::uint64_t before = 0;
    for (int i = 0; i < 2 * kSteps; ++i) {
      if (i == kSteps) before = reads();
      for (const std::uint32_t state : pass) use(state, true);
    }
    return reads() - before;
  }

 private:
  Budget budget_;
  SlabPool pool_;
  Budget host_budget_;
  SlabPool host_pool_;
  Residency host_;
  Residency residency_;
  Foresight foresight_;
  std::vector<StateRef> refs_;
};

// The same when what is used last always goes.
std::uint64_t least_reads(const Uses& step, std::size_t room) {
  Uses all;
  for (int i = 0; i < 3 * kSteps; ++i)
    all.insert(all.end(), step.begin(), step.end());
  const auto next = [&](std::uint32_t state, std::size_t from) {
    return std::find(all.begin() + static_cast<std::ptrdiff_t>(from), all.end(),
                     state) -
           all.begin();
  };
  std::set<std::uint32_t> there;
  std::uint64_t reads = 0;
  const std::size_t begin = kSteps * step.size();
  for (std::size_t p = 0; p < 2 * begin; ++p) {
    if (there.contains(all[p])) continue;
    if (p >= begin) ++reads;
    if (there.size() == room) {
      there.erase(*std::ranges::max_element(
          there, {}, [&](std::uint32_t one) { return next(one, p); }));
    }
    there.insert(all[p]);
  }
  return reads;
}

Uses scan(std::uint32_t states) {
  Uses uses(states);
  for (std::uint32_t i = 0; i < states; ++i) uses[i] = i;
  return uses;
}

Uses up_and_down(std::uint32_t states) {
  Uses uses = scan(states);
  for (std::uint32_t i = states; i-- > 0;) uses.push_back(i);
  return uses;
}

TEST(Foresight, ReadsAsLittleAsTheOfflineOptimum) {
  std::mt19937 random(1);
  for (int round = 0; round < 40; ++round) {
    const auto states = static_cast<std::uint32_t>(3 + random() % 12);
    const std::size_t room = 2 + random() % states;
    Uses step(8 + random() % 40);
    for (std::uint32_t& use : step)
      use = static_cast<std::uint32_t>(random() % states);
    // Two ways to the same least may be one read apart where the count begins.
    EXPECT_NEAR(double(Device(states, room, 0).train(step)),
                double(least_reads(step, room)), 1)
        << "round " << round;
  }
}

TEST(Foresight, ATrainingStepReadsTheLeastWhileUsesSettle) {
  const Uses step = up_and_down(12);
  for (std::size_t room = 2; room <= 12; ++room) {
    EXPECT_EQ(Device(12, room, room / 4).train(step), least_reads(step, room))
        << "room " << room;
  }
}

// Without foresight a scan finds nothing of what it has left.
TEST(Foresight, AnEvaluationFindsWhatFitsBesideSettlingStates) {
  constexpr std::uint32_t kStates = 12;
  constexpr std::size_t kRoom = 8;
  const Uses pass = scan(kStates);
  EXPECT_NEAR(double(Device(kStates, kRoom, 0).evaluate(pass)),
              double(least_reads(pass, kRoom)), 1);
  const std::uint64_t reads = Device(kStates, kRoom, 2).evaluate(pass);
  EXPECT_LE(reads, least_reads(pass, kRoom - 2));
  EXPECT_LT(reads, kSteps * kStates / 2);
}

TEST(Foresight, TrainingAndEvaluationsAreBothKnown) {
  const Uses step = up_and_down(10);
  const Uses pass = scan(10);
  constexpr std::size_t kRoom = 6;
  Device device(10, kRoom, 0);
  (void)device.train(step);
  EXPECT_NEAR(double(device.evaluate(pass)), double(least_reads(pass, kRoom)),
              1);
  EXPECT_NEAR(double(device.train(step)), double(least_reads(step, kRoom)), 1);
}

// Backward on a device has a thread of its own, and so have evaluations beside
// it: whatever they announce, everything can be used.
TEST(Foresight, SeveralThreadsUseOneDevice) {
  constexpr int kThreads = 3;
  constexpr std::uint32_t kStates = 12;
  Device device(kStates, 2 * kThreads, 1);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&device, i] {
      const bool evaluates = i == 0;
      for (int step = 0; step < 20; ++step) {
        for (const std::uint32_t use : up_and_down(kStates))
          device.use(use, evaluates);
        if (!evaluates) device.end_step();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace zinf
