#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "zinf/comm.h"

namespace zinf {
namespace {

TEST(ThreadGroup, ARankThatEndsFailsWhatWaitsForIt) {
  auto ends = make_thread_group(3);
  std::vector<std::byte> memory(10);
  auto under_way = ends[0]->receive(2, Lane::kGrads, memory);
  auto others = ends[0]->receive(1, Lane::kGrads, memory);
  ends[2].reset();
  Status gone = under_way->wait();
  EXPECT_EQ(gone.code(), Code::kGone);
  EXPECT_EQ(gone.text(), "rank 2 of 3 is gone: it has ended");
  EXPECT_EQ(ends[1]->send(2, Lane::kWeights, memory)->wait().code(),
            Code::kGone);
  EXPECT_FALSE(others->done());  // they go on
  EXPECT_TRUE(ends[1]->send(0, Lane::kGrads, memory)->wait().ok());
  EXPECT_TRUE(others->wait().ok());
}

TEST(ThreadGroup, OneThatClosesTellsWhy) {
  auto ends = make_thread_group(2);
  std::vector<std::byte> memory(10);
  auto mine = ends[0]->receive(1, Lane::kGrads, memory);
  ends[0]->close(Status::error(Code::kInvalid, "no more"));
  EXPECT_EQ(mine->wait().text(), "no more");
  auto theirs = ends[1]->receive(0, Lane::kGrads, memory);
  EXPECT_FALSE(theirs->done());
  ends[0].reset();
  EXPECT_EQ(theirs->wait().text(), "rank 0 of 2 is gone: no more");
}

TEST(ThreadGroup, AMessageOfAnotherSizeIsAnError) {
  auto ends = make_thread_group(2);
  std::vector<std::byte> memory(10);
  auto sent = ends[0]->send(1, Lane::kGrads, memory);
  Status status =
      ends[1]->receive(0, Lane::kGrads, std::span(memory).first(4))->wait();
  EXPECT_EQ(status.text(), "a message of 10 bytes, 4 were expected");
  EXPECT_TRUE(sent->wait().ok());  // it is small, and was over before
}

TEST(ThreadGroup, SmallMessagesOutliveTheirSender) {
  auto ends = make_thread_group(2);
  std::vector<std::byte> last(10, std::byte{3});
  std::vector<std::byte> memory(10);
  EXPECT_TRUE(ends[0]->send(1, Lane::kGrads, last)->wait().ok());
  ends[0].reset();
  EXPECT_TRUE(ends[1]->receive(0, Lane::kGrads, memory)->wait().ok());
  EXPECT_EQ(memory, last);
  EXPECT_EQ(ends[1]->receive(0, Lane::kGrads, memory)->wait().code(),
            Code::kGone);
}

TEST(ThreadGroup, ALimitedLinkTakesItsTime) {
  auto ends = make_thread_group(2, {.bytes_per_second = 1e6});
  std::vector<std::byte> from(20'000, std::byte{7});
  std::vector<std::byte> into(from.size());
  const auto begin = std::chrono::steady_clock::now();
  auto sent = ends[0]->send(1, Lane::kGrads, from);
  auto received = ends[1]->receive(0, Lane::kGrads, into);
  EXPECT_TRUE(received->wait().ok());
  EXPECT_TRUE(sent->wait().ok());
  EXPECT_GE(std::chrono::steady_clock::now() - begin,
            std::chrono::milliseconds(20));
  EXPECT_EQ(into, from);
}

}  // namespace
}  // namespace zinf
