// A million recorded allocations and frees of training steps. Waste is pages
// held at the most beyond bytes live at the most.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tests/unit/mem/alloc_trace.h"
#include "tests/unit/mem/mem_test_util.h"
#include "zinf/arena.h"

namespace zinf {
namespace {

// Marks both ends of a block and looks at them again when it is freed: a block
// that was given out twice is noticed, and few pages are touched.
struct MarkingHeap {
  Arena& arena;
  std::uint64_t num_broken = 0;

  void* allocate(std::size_t bytes) {
    auto* block = static_cast<std::byte*>(arena.allocate(bytes));
    if (block != nullptr) mark(block, bytes);
    return block;
  }
  void free(void* pointer, std::size_t bytes) {
    auto* block = static_cast<std::byte*>(pointer);
    std::byte mark = mark_of(block, bytes);
    if (block[0] != mark || block[bytes - 1] != mark) ++num_broken;
    Arena::free(pointer);
  }

 private:
  static std::byte mark_of(const std::byte* block, std::size_t bytes) {
    std::uint64_t mixed =
        (reinterpret_cast<std::uintptr_t>(block) ^ bytes) * 0x9e3779b97f4a7c15;
    return static_cast<std::byte>(mixed >> 56);
  }
  static void mark(std::byte* block, std::size_t bytes) {
    block[0] = block[bytes - 1] = mark_of(block, bytes);
  }
};

class Replay : public testing::TestWithParam<const char*> {
 protected:
  static AllocTrace load() {
    return AllocTrace::load(std::string(ZINF_TEST_DATA) + "/allocs_" +
                            GetParam() + ".bin")
        .value();
  }
};

TEST_P(Replay, WastesLessThanATwentieth) {
  constexpr std::size_t kEvents = kSanitized ? 60'000 : 340'000;
  AllocTrace trace = load();
  Budget budget = make_budget(std::uint64_t{64} << 30);
  Arena arena = make_arena({.budget = &budget});
  MarkingHeap heap{arena};
  std::size_t live_high = 0;
  {
    TraceReplay<MarkingHeap> replay(trace, heap);
    ASSERT_TRUE(replay.run(kEvents));
    live_high = replay.live_high_bytes();
    EXPECT_GE(replay.num_events(), kEvents);
    EXPECT_GE(arena.stats().live_bytes, replay.live_bytes());
  }
  EXPECT_EQ(heap.num_broken, 0u);
  ArenaStats stats = arena.stats();
  double waste = static_cast<double>(stats.committed_high_bytes) /
                     static_cast<double>(live_high) -
                 1;
  RecordProperty("waste", std::to_string(waste));
  EXPECT_LT(waste, 0.05);
  EXPECT_EQ(budget.usage().total.high_bytes, stats.committed_high_bytes);
  EXPECT_EQ(stats.live_bytes, 0u);
  // Pages are reused, not taken anew at every step.
  EXPECT_LT(stats.fresh_bytes, 4 * stats.committed_high_bytes);
  arena.trim();
  EXPECT_EQ(budget.usage().total.used_bytes, 0u);
}

TEST_P(Replay, FitsABudgetThatIsATwentiethMoreThanWhatIsLive) {
  AllocTrace trace = load();
  std::size_t live_high = trace.live_high_bytes();
  Budget budget = make_budget(live_high + live_high / 20);
  Arena arena = make_arena({.budget = &budget});
  MarkingHeap heap{arena};
  TraceReplay<MarkingHeap> replay(trace, heap);
  EXPECT_TRUE(replay.run(50'000));
  EXPECT_EQ(replay.live_high_bytes(), live_high);
  EXPECT_EQ(heap.num_broken, 0u);
}

INSTANTIATE_TEST_SUITE_P(Training, Replay,
                         testing::Values("gpt2", "llama", "cnn"),
                         [](const auto& with) {
                           return std::string(with.param);
                         });

}  // namespace
}  // namespace zinf
