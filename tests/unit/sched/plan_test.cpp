#include "zinf/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/unit/sched/traces.h"

namespace zinf {
namespace {

constexpr auto kRead = UseKind::kRead;
constexpr auto kChange = UseKind::kChange;
constexpr auto kReplace = UseKind::kReplace;
constexpr auto kFree = UseKind::kFree;

Forecast forecast(const Case& given, const PlanInput& input) {
  return simulate(given.trace, make_plan(given.trace, input).value(), input)
      .value();
}

std::vector<Action> actions_of(const Plan& plan, std::uint32_t state) {
  std::vector<Action> found;
  std::ranges::copy_if(plan.actions, std::back_inserter(found),
                       [&](const Action& a) { return a.state == state; });
  return found;
}

Case make_case(std::vector<std::vector<StateUse>> positions,
               std::vector<PlanState> states) {
  Case made;
  made.states = std::move(states);
  for (const auto& at_once : positions) made.trace.add(at_once);
  return made;
}

TEST(Plan, MovesNothingWhenAllFits) {
  const Case given = training_step(10, 7);
  const PlanInput input = given.input(given.bytes());
  EXPECT_TRUE(make_plan(given.trace, input).value().actions.empty());
  EXPECT_EQ(forecast(given, input).bytes_read, 0u);
}

TEST(Plan, NamesTheLeastBudgetThatWouldDo) {
  const Case given = make_case({{{0, kRead}, {1, kRead}}, {{2, kRead}}},
                               {{.bytes = 30}, {.bytes = 40}, {.bytes = 50}});
  const auto refused = make_plan(given.trace, given.input(69));
  EXPECT_EQ(refused.status().code(), Code::kOverBudget);
  EXPECT_NE(refused.status().text().find("(70 B)"), std::string::npos)
      << refused.status().text();
  EXPECT_EQ(least_budget(given.trace, given.input(0)).value(), 70u);
  EXPECT_EQ(forecast(given, given.input(70)).high_bytes, 70u);
}

TEST(Plan, RefusesInputThatMakesNoSense) {
  const Case given = scan(3, kRead);
  PlanInput input = given.input(3);
  input.states = input.states.first(2);
  EXPECT_EQ(make_plan(given.trace, input).status().code(), Code::kInvalid);
  input = given.input(3);
  input.write_bytes_per_second = 0;
  EXPECT_EQ(make_plan(given.trace, input).status().code(), Code::kInvalid);
  const std::vector<double> seconds(2, 1.0);
  input = given.input(3);
  input.compute_seconds = seconds;
  EXPECT_EQ(make_plan(given.trace, input).status().code(), Code::kInvalid);
}

TEST(Plan, AnyBudgetBeyondAllStatesIsEnough) {
  const Case given = scan(3, kChange);
  const PlanInput input = given.input(~std::uint64_t{0});
  EXPECT_TRUE(make_plan(given.trace, input).value().actions.empty());
  Case huge = scan(3, kChange, std::uint64_t{1} << 62);
  EXPECT_EQ(
      make_plan(huge.trace, huge.input(~std::uint64_t{0})).status().code(),
      Code::kInvalid);
}

TEST(Plan, StatesWithoutBytesDoNoHarm) {
  const Case given = scan(3, kChange, 0);
  PlanInput input = given.input(1);
  input.ahead_bytes = 1;
  EXPECT_EQ(forecast(given, input).high_bytes, 0u);
}

TEST(Plan, OfAnEmptyTraceIsEmpty) {
  const Trace empty;
  const PlanInput input;
  const Plan plan = make_plan(empty, input).value();
  EXPECT_TRUE(plan.actions.empty());
  EXPECT_EQ(simulate(empty, plan, input).value().seconds, 0.0);
}

TEST(Plan, NewContentIsWrittenAndThenDropped) {
  const Case given = scan(4, kChange);
  const Plan plan = make_plan(given.trace, given.input(1)).value();
  for (std::uint32_t state = 0; state < 4; ++state) {
    EXPECT_EQ(
        std::ranges::count(plan.actions, Action{state, ActionKind::kWrite}), 1);
    EXPECT_EQ(
        std::ranges::count(plan.actions, Action{state, ActionKind::kDrop}), 1);
    EXPECT_EQ(
        std::ranges::count(plan.actions, Action{state, ActionKind::kFetch}), 1);
  }
  const Forecast step = forecast(given, given.input(1));
  EXPECT_EQ(step.bytes_read, 4u);
  EXPECT_EQ(step.bytes_written, 4u);
}

TEST(Plan, WhatWasOnlyReadIsNotWritten) {
  const Case given = scan(4, kRead);
  EXPECT_EQ(forecast(given, given.input(1)).bytes_written, 0u);
}

TEST(Plan, ReplacedContentIsNotRead) {
  const Case given = scan(4, kReplace);
  const Forecast step = forecast(given, given.input(1));
  EXPECT_EQ(step.bytes_read, 0u);
  EXPECT_EQ(step.bytes_written, 4u);
}

TEST(Plan, FreedContentIsNeitherWrittenNorRead) {
  const Case given =
      make_case({{{0, kReplace}}, {{0, kFree}}, {{1, kReplace}}, {{1, kFree}}},
                {{.bytes = 5}, {.bytes = 5}});
  EXPECT_TRUE(make_plan(given.trace, given.input(5)).value().actions.empty());
}

TEST(Plan, AGradientThatDoesNotFitGoesBelowUntilItIsFreed) {
  const Case given =
      make_case({{{0, kReplace}}, {{1, kRead}}, {{0, kRead}}, {{0, kFree}}},
                {{.bytes = 5}, {.bytes = 5}});
  const Forecast step = forecast(given, given.input(5));
  EXPECT_EQ(step.bytes_read, 5u + 5u);
  EXPECT_EQ(step.bytes_written, 5u);
}

TEST(Plan, StatesThatStayCountAndAreNeverDropped) {
  Case given = scan(4, kChange);
  given.states[2].stays = true;
  given.states.push_back({.bytes = 3, .stays = true});  // not used
  EXPECT_EQ(least_budget(given.trace, given.input(0)).value(), 5u);
  const Plan plan = make_plan(given.trace, given.input(5)).value();
  EXPECT_TRUE(actions_of(plan, 2).empty());
  EXPECT_EQ(forecast(given, given.input(5)).bytes_read, 3u);
  EXPECT_EQ(forecast(given, given.input(5)).high_bytes, 5u);
}

TEST(Plan, StatesThatLeaveAreKeptOnlyInTheirShare) {
  // 0 is used twice, 1 in between.
  Case given =
      make_case({{{0, kRead}}, {{1, kRead}}, {{0, kChange}}, {}, {}},
                {{.bytes = 10, .leaves = true}, {.bytes = 7, .leaves = true}});
  PlanInput input = given.input(100);
  EXPECT_EQ(forecast(given, input).bytes_read, 27u) << "none stays";
  input.leaving_bytes = 10;
  EXPECT_EQ(forecast(given, input).bytes_read, 7u) << "there is room for 0";
  EXPECT_EQ(forecast(given, input).bytes_written, 0u);
  input.leaving_bytes = 17;
  EXPECT_EQ(forecast(given, input).bytes_read, 0u);
  given.states[1].leaves = false;
  input.leaving_bytes = 0;
  EXPECT_EQ(forecast(given, input).bytes_read, 20u) << "1 may stay";
}

TEST(Plan, WhatOthersTakeIsNotForStates) {
  const Case given = scan(4, kRead);
  const std::vector<std::uint64_t> taken = {0, 2, 0, 1};
  PlanInput input = given.input(4);
  input.taken_bytes = taken;
  EXPECT_EQ(least_budget(given.trace, input).value(), 3u);
  // Three are in memory at the first position, but one at the second.
  EXPECT_EQ(forecast(given, input).bytes_read, 2u);
  input.taken_bytes = input.taken_bytes.first(3);
  EXPECT_EQ(make_plan(given.trace, input).status().code(), Code::kInvalid);
}

TEST(Plan, FetchesAheadJustEarlyEnoughToHideTheRead) {
  const Case given = scan(10, kRead, 1000);
  const std::vector<double> seconds(10, 0.4e-6);
  PlanInput input = given.input(8000);
  input.ahead_bytes = 7000;  // one state is in use: nothing is kept
  input.compute_seconds = seconds;
  input.read_bytes_per_second = 2e9;  // 0.5 us: over one position, not two
  const Plan plan = make_plan(given.trace, input).value();
  std::size_t fetches = 0;
  for (std::size_t p = 0; p < given.trace.size(); ++p) {
    for (const Action& action : plan.at(p)) {
      if (action.kind != ActionKind::kFetch) continue;
      ++fetches;
      const std::size_t ahead = (action.state + 10 - p) % 10;
      EXPECT_GE(ahead, 1u);
      EXPECT_LE(ahead, 3u);
    }
  }
  EXPECT_EQ(fetches, 10u);
  const Forecast step = simulate(given.trace, plan, input).value();
  EXPECT_NEAR(step.seconds, 5e-6, 1e-9);  // the reads alone
}

TEST(Plan, FetchesAheadOnlyAsMemoryAllows) {
  const Case given = scan(10, kRead, 1000);
  const std::vector<double> seconds(10, 1e-6);
  PlanInput input = given.input(2000);
  input.ahead_bytes = 1000;
  input.compute_seconds = seconds;
  input.read_bytes_per_second = 0.25e9;  // 4 us would need four states
  const Forecast step = forecast(given, input);
  EXPECT_EQ(step.high_bytes, 2000u);
  EXPECT_NEAR(step.seconds, 40e-6, 1e-9);
}

TEST(Plan, SmallMovesInARowStartTogether) {
  const Case given = scan(64, kChange, 64 << 10);
  const std::vector<double> seconds(64, 1e-3);
  PlanInput input = given.input(std::uint64_t{40} * (64 << 10));
  input.ahead_bytes = 24 * (64 << 10);
  input.request_bytes = 512 << 10;
  input.compute_seconds = seconds;
  const Plan plan = make_plan(given.trace, input).value();
  const auto positions_with = [&](ActionKind kind) {
    std::size_t positions = 0;
    std::size_t actions = 0;
    for (std::size_t p = 0; p < given.trace.size(); ++p) {
      const auto count = std::ranges::count(plan.at(p), kind, &Action::kind);
      positions += count > 0;
      actions += static_cast<std::size_t>(count);
    }
    EXPECT_GT(actions, 20u);
    return std::pair(positions, actions);
  };
  for (const ActionKind kind : {ActionKind::kWrite, ActionKind::kFetch}) {
    const auto [positions, actions] = positions_with(kind);
    EXPECT_LE(positions, actions / 3);
  }
  EXPECT_LE(forecast(given, input).high_bytes, input.budget_bytes);
}

TEST(Plan, SmallMovesWithoutMemoryToWaitInCostNoStall) {
  const Case given = scan(64, kChange, 64 << 10);
  const std::vector<double> seconds(64, 1e-3);
  for (const std::uint64_t ahead : {2, 3, 5}) {
    PlanInput input = given.input(std::uint64_t{40} * (64 << 10));
    input.ahead_bytes = ahead * (64 << 10);
    input.compute_seconds = seconds;
    const Forecast apart = forecast(given, input);
    input.request_bytes = 1 << 20;
    EXPECT_LE(forecast(given, input).stall_seconds, apart.stall_seconds + 1e-12)
        << ahead;
  }
}

TEST(Plan, MemoryForRequestsMovesNothingThatFits) {
  Case given = scan(16, kChange, 64 << 20);
  given.states[3].bytes = 64 << 10;
  const std::vector<double> seconds(16, 0.1);
  PlanInput input = given.input(given.bytes());
  input.request_bytes = 1 << 20;
  input.compute_seconds = seconds;
  const Plan plan = fastest_plan(given.trace, input).value();
  EXPECT_EQ(plan.actions.size(), 0u);
}

TEST(Plan, HidesReadsAndWritesWhenComputeIsLonger) {
  const Case given = scan(20, kChange, 1000);
  const std::vector<double> seconds(20, 1.5e-6);
  PlanInput input = given.input(10000);
  input.compute_seconds = seconds;
  EXPECT_GT(forecast(given, input).stall_seconds, 0.0);
  input.ahead_bytes = 2000;
  EXPECT_LT(forecast(given, input).stall_seconds, 1e-12);
}

TEST(Plan, TheFastestTakesMemoryForMovesAhead) {
  const Case given = scan(100, kChange, 1000);
  const std::vector<double> seconds(100, 0.55e-6);
  PlanInput input = given.input(50000);
  input.compute_seconds = seconds;
  const Plan plan = fastest_plan(given.trace, input).value();
  const Forecast step = simulate(given.trace, plan, input).value();
  EXPECT_LE(step.high_bytes, 50000u);
  EXPECT_LT(step.seconds, 1.1 * 55e-6);
  EXPECT_GT(forecast(given, input).seconds, 2 * 55e-6);
  EXPECT_EQ(fastest_plan(given.trace, given.input(999)).status().code(),
            Code::kOverBudget);
}

// Twice as fast a disk hides everything without keeping: still not worth it.
TEST(Plan, TheFastestMovesNothingTwiceForASmallGain) {
  const Case given = scan(100, kChange, 1000);
  const std::vector<double> seconds(100, 4e-6);
  PlanInput input = given.input(98000);
  input.compute_seconds = seconds;
  input.ahead_bytes = 0;
  const Forecast least = forecast(given, input);
  const Plan plan = fastest_plan(given.trace, input).value();
  const Forecast step = simulate(given.trace, plan, input).value();
  EXPECT_LE(step.bytes_read + step.bytes_written,
            2 * (least.bytes_read + least.bytes_written));
}

TEST(Simulate, RefusesPlansThatAreWrong) {
  const Case given = scan(3, kChange);
  const PlanInput input = given.input(3);
  const auto with = [&](std::vector<Action> actions) {
    Plan plan{.actions = std::move(actions), .ends = {0, 0, 0}};
    plan.ends[2] = static_cast<std::uint32_t>(plan.actions.size());
    return simulate(given.trace, plan, input).status().text();
  };
  EXPECT_EQ(with({}), "ok");
  EXPECT_NE(with({{0, ActionKind::kDrop}}).find("before it was written"),
            std::string::npos);
  EXPECT_NE(with({{0, ActionKind::kWrite}, {0, ActionKind::kDrop}})
                .find("is used but not fetched"),
            std::string::npos);
  EXPECT_NE(with({{0, ActionKind::kFetch}}).find("is fetched twice"),
            std::string::npos);
  EXPECT_NE(with({{9, ActionKind::kDrop}}).find("is not known"),
            std::string::npos);
}

// simulate() refuses uses without content, drops of unwritten content and the
// like; so a forecast at all is most of the proof.
TEST(PlanProperty, RandomPlansKeepTheBudgetAndFindEveryState) {
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    const std::uint32_t num_states = 1 + seed % 23;
    Case given = random_case(3 + seed % 90, num_states, Sizes::kDifferent,
                             Kinds::kAll, seed);
    if (seed % 3 == 0) given.states[seed % num_states].stays = true;
    if (seed % 4 == 0) given.states[seed / 3 % num_states].leaves = true;
    const std::uint64_t least =
        least_budget(given.trace, given.input(0)).value();
    std::mt19937 random(seed);
    std::vector<double> seconds(given.trace.size());
    for (double& s : seconds) s = 1e-9 * (random() % 100);
    PlanInput input = given.input(least + random() % (given.bytes() + 1));
    const std::vector<std::uint64_t> taken(given.trace.size(), seed % 7);
    if (seed % 5 == 0) {
      input.taken_bytes = taken;
      input.budget_bytes += seed % 7;
    }
    input.ahead_bytes = random() % (input.budget_bytes + 1);
    if (seed % 3 == 1) input.request_bytes = 1 + random() % given.bytes();
    if (seed % 2 == 0) input.compute_seconds = seconds;
    const auto plan = make_plan(given.trace, input);
    ASSERT_TRUE(plan.ok()) << seed << ": " << plan.status().text();
    const auto step = simulate(given.trace, plan.value(), input);
    ASSERT_TRUE(step.ok()) << seed << ": " << step.status().text();
    const std::uint64_t others = seed % 5 == 0 ? seed % 7 : 0;
    EXPECT_LE(step.value().high_bytes + others, input.budget_bytes) << seed;
  }
}

}  // namespace
}  // namespace zinf
