#include "zinf/trace_book.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace zinf {
namespace {

constexpr auto kRead = UseKind::kRead;
using Step = std::vector<std::uint32_t>;

std::vector<Follow> feed(TraceBook& book, const Step& step) {
  std::vector<Follow> answers;
  for (const std::uint32_t state : step)
    answers.push_back(book.use(state, kRead));
  return answers;
}

std::vector<Follow> run(TraceBook& book, const Step& step) {
  std::vector<Follow> answers = feed(book, step);
  book.end_step();
  return answers;
}

std::uint64_t deviations(TraceBook& book, const Step& step) {
  const std::uint64_t before = book.stats().deviations;
  run(book, step);
  return book.stats().deviations - before;
}

Step upcoming(const TraceBook& book, std::size_t num_positions) {
  Step states;
  for (const StateUse& use : book.upcoming(num_positions))
    states.push_back(use.state);
  return states;
}

const Step kTrain{0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0};

TEST(Trace, UsesOfOneStateAtOnceBecomeOne) {
  Trace trace;
  trace.add(std::vector<StateUse>{
      {1, kRead}, {2, kRead}, {1, UseKind::kReplace}, {2, kRead}});
  ASSERT_EQ(trace.size(), 1u);
  const std::vector<StateUse> uses(trace.at(0).begin(), trace.at(0).end());
  EXPECT_EQ(uses, (std::vector<StateUse>{{1, UseKind::kChange}, {2, kRead}}));
}

TEST(TraceBook, KnowsNothingInTheFirstStep) {
  TraceBook book;
  EXPECT_EQ(feed(book, {1, 2}), (std::vector(2, Follow::kRecording)));
  EXPECT_TRUE(book.upcoming(4).empty());
  EXPECT_FALSE(book.until_use(1).has_value());
  EXPECT_EQ(book.trace(), nullptr);
}

TEST(TraceBook, ExpectsTheSecondStepAndForetellsOverItsEnd) {
  TraceBook book;
  run(book, {5, 6, 7, 5});
  EXPECT_EQ(upcoming(book, 2), (Step{5, 6}));
  EXPECT_EQ(feed(book, {5, 6}), (std::vector(2, Follow::kExpected)));
  EXPECT_EQ(book.position(), 2u);
  EXPECT_EQ(upcoming(book, 3), (Step{7, 5, 5}));
  EXPECT_EQ(upcoming(book, 99), (Step{7, 5, 5, 6}));
  EXPECT_EQ(book.until_use(7), 0u);
  EXPECT_EQ(book.until_use(5), 1u);
  EXPECT_EQ(book.until_use(6), 3u);
  EXPECT_FALSE(book.until_use(8).has_value());
}

TEST(TraceBook, AFreedStateIsNotWaitedFor) {
  TraceBook book;
  for (int step = 0; step < 2; ++step) {
    book.use(1, UseKind::kReplace);
    book.use(2, kRead);
    EXPECT_EQ(book.until_use(1).has_value(), false);
    book.use(1, UseKind::kFree);
    if (step == 0) book.end_step();
  }
  EXPECT_EQ(book.until_use(1), 0u);
}

TEST(TraceBook, ASkippedPartIsRejoinedAtOnce) {
  TraceBook book;
  run(book, kTrain);
  feed(book, {0, 1});
  EXPECT_EQ(book.use(4, kRead), Follow::kRejoined);
  EXPECT_EQ(upcoming(book, 3), (Step{5, 6, 7}));
  EXPECT_EQ(book.use(5, kRead), Follow::kExpected);
}

TEST(TraceBook, AnUnknownUseChangesNothing) {
  TraceBook book;
  run(book, kTrain);
  feed(book, {0, 1});
  EXPECT_EQ(book.use(99, kRead), Follow::kUnknown);
  EXPECT_EQ(upcoming(book, 2), (Step{2, 3}));
  EXPECT_EQ(book.until_use(3), 1u);
  EXPECT_EQ(book.use(2, kRead), Follow::kExpected);
}

TEST(TraceBook, AnExtraUseCostsTwoDeviations) {
  TraceBook book;
  run(book, kTrain);
  feed(book, {0, 1, 2, 3});
  EXPECT_EQ(book.use(7, kRead), Follow::kRejoined);
  EXPECT_EQ(upcoming(book, 1), (Step{7}));
  EXPECT_EQ(book.use(4, kRead), Follow::kRejoined);  // where it was left
  EXPECT_EQ(upcoming(book, 3), (Step{5, 6, 7}));
}

TEST(TraceBook, AnotherTraceForgetsWhereTheLastOneWasLeft) {
  TraceBook book;
  run(book, {20, 21, 22});
  run(book, kTrain);
  feed(book, {0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 3});  // left at 10, of 16
  EXPECT_EQ(book.use(21, kRead), Follow::kRejoined);
  EXPECT_EQ(book.use(5, kRead), Follow::kRejoined);
  EXPECT_EQ(upcoming(book, 2), (Step{6, 7}));
}

TEST(TraceBook, GenerateRepeatsTheForwardPass) {
  TraceBook book;
  run(book, kTrain);
  feed(book, {0, 1, 2, 3, 4, 5, 6, 7});
  for (int token = 0; token < 3; ++token) {
    feed(book, {0, 1, 2, 3, 4, 5, 6});
    EXPECT_EQ(upcoming(book, 1), (Step{7}));
    EXPECT_EQ(book.use(7, kRead), Follow::kExpected);
  }
}

TEST(TraceBook, OneOddStepLeavesTheTraceAsItWas) {
  TraceBook book;
  run(book, kTrain);
  const std::uint64_t id = book.trace_id();
  EXPECT_GT(
      deviations(book, {0, 1, 2, 9, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0}),
      0u);
  EXPECT_EQ(book.trace_id(), id);
  EXPECT_EQ(deviations(book, kTrain), 0u);
}

TEST(TraceBook, StatesThatCameOrWentAreLearned) {
  TraceBook book;
  run(book, kTrain);
  const std::uint64_t id = book.trace_id();
  const Step changed{0, 1, 2, 3, 4, 5, 7, 17, 7, 5, 4, 3, 2, 1, 0};
  EXPECT_GT(deviations(book, changed), 0u);
  EXPECT_GT(deviations(book, changed), 0u);
  EXPECT_EQ(deviations(book, changed), 0u);
  EXPECT_NE(book.trace_id(), id);
  EXPECT_EQ(book.num_traces(), 1u);
  EXPECT_FALSE(book.until_use(6).has_value());
}

TEST(TraceBook, TrainAndEvalAreTwoTraces) {
  TraceBook book;
  const Step eval{0, 1, 2, 3, 4, 5, 6, 7, 8};
  run(book, kTrain);
  const std::uint64_t train_id = book.trace_id();
  run(book, eval);
  EXPECT_EQ(book.num_traces(), 2u);
  EXPECT_NE(book.trace_id(), train_id);

  // They begin alike: the first difference tells.
  feed(book, {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(book.use(7, kRead), Follow::kSwitched);
  EXPECT_EQ(book.trace_id(), train_id);
  EXPECT_EQ(feed(book, {6, 5, 4, 3, 2, 1, 0}),
            (std::vector(7, Follow::kExpected)));
  book.end_step();
  EXPECT_EQ(deviations(book, eval), 1u);
  EXPECT_EQ(deviations(book, eval), 0u);
  EXPECT_EQ(book.num_traces(), 2u);
}

TEST(TraceBook, TheTraceThatWasFollowedLongestAgoGoes) {
  TraceBook book(2);
  run(book, {1, 2, 3});
  run(book, {4, 5, 6});
  run(book, {1, 2, 3});
  run(book, {7, 8, 9});  // 4, 5, 6 goes
  EXPECT_EQ(book.num_traces(), 2u);
  EXPECT_EQ(deviations(book, {1, 2, 3}), 1u);  // at the first use
  EXPECT_EQ(deviations(book, {4, 5, 6}), 3u);
}

TEST(TraceBook, RoutingThatChangesEveryStepDoesNotFillTheBook) {
  TraceBook book;
  std::mt19937 random(3);
  const auto moe_step = [&] {
    Step step;
    for (std::uint32_t layer = 0; layer < 40; ++layer) {
      step.push_back(layer);
      if (layer % 8 == 0)
        step.push_back(100 + static_cast<std::uint32_t>(random() % 64));
    }
    return step;
  };
  for (int i = 0; i < 50; ++i) EXPECT_LE(deviations(book, moe_step()), 15u);
  EXPECT_EQ(book.num_traces(), 1u);
}

TEST(TraceBook, ForetellsWhateverItWasFed) {
  std::mt19937 random(11);
  TraceBook book(3);
  for (int step = 0; step < 200; ++step) {
    for (std::uint32_t i = random() % 20; i > 0; --i) {
      std::vector<StateUse> at_once{{static_cast<std::uint32_t>(random() % 6),
                                     static_cast<UseKind>(random() % 4)}};
      if (at_once[0].kind != UseKind::kFree && random() % 2 == 0)
        at_once.push_back({static_cast<std::uint32_t>(random() % 6), kRead});
      book.use(at_once);
      const std::vector<StateUse> next = book.upcoming(7);
      for (std::uint32_t state = 0; state < 6; ++state) {
        const auto until = book.until_use(state);
        if (!until) continue;
        const auto there =
            book.trace()->at((book.position() + *until) % book.trace()->size());
        EXPECT_TRUE(std::ranges::any_of(
            there, [&](const StateUse& use) { return use.state == state; }));
      }
    }
    book.end_step();
    EXPECT_LE(book.num_traces(), 3u);
  }
}

}  // namespace
}  // namespace zinf
