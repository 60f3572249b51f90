#include "src/base/interrupts.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

#include <atomic>
#include <optional>
#include <stdexcept>
#include <thread>

namespace zinf {
namespace {

std::atomic<int> arrived = 0;
void count(int) { ++arrived; }
void count_again(int) { arrived += 100; }

void (*installed())(int) {
  struct sigaction now{};
  sigaction(SIGINT, nullptr, &now);
  return now.sa_handler;
}

class InterruptsTest : public testing::Test {
 protected:
  void SetUp() override {
    arrived = 0;
    before_ = std::signal(SIGINT, &count);
  }
  void TearDown() override { std::signal(SIGINT, before_); }
  void (*before_)(int) = SIG_DFL;
};

TEST_F(InterruptsTest, OneWaitsForTheEndOfTheHold) {
  {
    HoldInterrupts hold;
    raise(SIGINT);
    EXPECT_EQ(arrived, 0);
  }
  EXPECT_EQ(arrived, 1);
  EXPECT_EQ(installed(), &count);
  raise(SIGINT);
  EXPECT_EQ(arrived, 2);
}

TEST_F(InterruptsTest, TheSecondArrivesAtOnceAndTheFirstNotAgain) {
  {
    HoldInterrupts hold;
    raise(SIGINT);
    raise(SIGINT);
    EXPECT_EQ(arrived, 1);
    raise(SIGINT);
    EXPECT_EQ(arrived, 2);
  }
  EXPECT_EQ(arrived, 2);
}

TEST_F(InterruptsTest, TheLastOfSeveralHoldsLetsItGo) {
  HoldInterrupts outer;
  std::thread([&] {
    HoldInterrupts inner;
    raise(SIGINT);
  }).join();
  EXPECT_EQ(arrived, 0);
  outer.end();
  EXPECT_EQ(arrived, 1);
  outer.end();
  EXPECT_EQ(arrived, 1);
}

TEST_F(InterruptsTest, AHandlerThatCameMeanwhileStays) {
  {
    HoldInterrupts hold;
    raise(SIGINT);
    std::signal(SIGINT, &count_again);
  }
  EXPECT_EQ(arrived, 100);
  EXPECT_EQ(installed(), &count_again);
}

TEST_F(InterruptsTest, AnIgnoredOneStaysIgnored) {
  std::signal(SIGINT, SIG_IGN);
  WatchInterrupts watch;
  {
    HoldInterrupts hold;
    raise(SIGINT);
  }
  EXPECT_FALSE(watch.seen());
  EXPECT_EQ(installed(), SIG_IGN);
}

TEST_F(InterruptsTest, AWatchNotesWhatItPassesOn) {
  WatchInterrupts watch;
  EXPECT_FALSE(watch.seen());
  raise(SIGINT);
  EXPECT_EQ(arrived, 1);
  EXPECT_TRUE(watch.seen());
  watch.restart();
  EXPECT_FALSE(watch.seen());
  {
    HoldInterrupts hold;
    raise(SIGINT);
    EXPECT_TRUE(watch.seen());
    EXPECT_EQ(arrived, 1);
  }
  EXPECT_EQ(arrived, 2);
}

TEST_F(InterruptsTest, ARestartedWatchComesBeforeANewHandler) {
  WatchInterrupts watch;
  std::signal(SIGINT, &count_again);
  watch.restart();
  raise(SIGINT);
  EXPECT_TRUE(watch.seen());
  EXPECT_EQ(arrived, 100);
}

TEST_F(InterruptsTest, WhatTheCheckThrowsEndsTheHold) {
  set_interrupt_check([] { throw std::runtime_error("one from before"); });
  EXPECT_THROW(HoldInterrupts(), std::runtime_error);
  set_interrupt_check(nullptr);
  EXPECT_EQ(installed(), &count);
  raise(SIGINT);
  EXPECT_EQ(arrived, 1);
}

TEST_F(InterruptsTest, AChildOfForkHoldsNothing) {
  HoldInterrupts hold;
  pid_t child = fork();
  if (child == 0) {
    raise(SIGINT);
    _exit(arrived == 1 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(InterruptsDeathTest, WithoutAHandlerItEndsTheProcessAfterTheHold) {
  EXPECT_EXIT(
      {
        std::signal(SIGINT, SIG_DFL);
        HoldInterrupts hold;
        raise(SIGINT);
        (void)write(STDERR_FILENO, "held", 4);
        hold.end();
        _exit(0);
      },
      testing::KilledBySignal(SIGINT), "held");
  EXPECT_EXIT(
      {
        std::signal(SIGINT, SIG_DFL);
        HoldInterrupts hold;
        raise(SIGINT);
        raise(SIGINT);
        _exit(0);
      },
      testing::KilledBySignal(SIGINT), "");
}

}  // namespace
}  // namespace zinf
