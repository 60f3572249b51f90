#include "adapters/emulated/stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "adapters/emulated/streams.h"
#include "tests/support/ok.h"

namespace zinf::emulated {
namespace {

// A task that waits to be let go.
class Gate {
 public:
  std::function<void()> task() {
    return [this] {
      while (!open_) std::this_thread::yield();
    };
  }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_{false};
};

TEST(Stream, DoesTasksInTheOrderOfTheQueue) {
  auto stream = ok(Stream::create(0));
  stream->set_pace({.max_delay = std::chrono::microseconds(50), .seed = 3});
  std::vector<int> seen;
  for (int i = 0; i < 100; ++i) {
    stream->enqueue("", [&seen, i] { seen.push_back(i); });
  }
  mark(*stream).wait();
  ASSERT_EQ(seen.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(seen[static_cast<std::size_t>(i)], i);
}

TEST(Stream, ReturnsBeforeTheTaskIsDone) {
  auto stream = ok(Stream::create(0));
  Gate gate;
  Stream::Ticket ticket = stream->enqueue("", gate.task());
  EXPECT_FALSE(stream->done(ticket));
  gate.open();
  stream->wait(ticket);
  EXPECT_TRUE(stream->done(ticket));
}

TEST(Stream, DoesWhatIsQueuedBeforeItsEnd) {
  std::atomic<int> done{0};
  {
    auto stream = ok(Stream::create(0));
    for (int i = 0; i < 20; ++i) stream->enqueue("", [&] { ++done; });
  }
  EXPECT_EQ(done, 20);
}

TEST(Stream, HoldsForAnothersMark) {
  auto first = ok(Stream::create(0));
  auto second = ok(Stream::create(1));
  Gate gate;
  std::vector<int> seen;
  first->enqueue("", gate.task());
  first->enqueue("", [&] { seen.push_back(1); });
  hold(*second, mark(*first));
  second->enqueue("", [&] { seen.push_back(2); });
  EXPECT_FALSE(mark(*second).done());
  gate.open();
  mark(*second).wait();
  EXPECT_EQ(seen, (std::vector<int>{1, 2}));
}

TEST(Stream, AMarkIsOfWhatWasQueuedUntilThen) {
  auto stream = ok(Stream::create(0));
  Gate gate;
  Mark before = mark(*stream);
  stream->enqueue("", gate.task());
  before.wait();
  EXPECT_TRUE(before.done());
  EXPECT_TRUE(Mark().done());
  gate.open();
}

TEST(Stream, KeepsTheFirstErrorAndGoesOn) {
  auto stream = ok(Stream::create(0));
  bool after = false;
  stream->enqueue("", [] { throw std::runtime_error("first"); });
  stream->enqueue("", [] { throw std::runtime_error("second"); });
  stream->enqueue("", [&] { after = true; });
  mark(*stream).wait();
  EXPECT_TRUE(after);
  try {
    stream->check();
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first");
  }
  stream->check();  // it was told once
}

TEST(Stream, NotesWhatItDidWhileItIsTraced) {
  auto stream = ok(Stream::create(0));
  stream->enqueue("before", [] {});
  mark(*stream).wait();
  stream->trace(true);
  stream->enqueue("product", [] {}, std::chrono::milliseconds(2));
  stream->enqueue("", [] {});
  mark(*stream).wait();
  std::vector<Span> spans = stream->trace(false);
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].name, "product");
  EXPECT_GE(spans[0].end_ns - spans[0].begin_ns, 2'000'000);
}

TEST(Streams, GivesOutOthersThanTheDefault) {
  auto streams = ok(Streams::create());
  for (std::size_t i = 0; i < 2 * Streams::kStreams; ++i) {
    Streams::Id id = streams->next();
    EXPECT_GT(id, 0u);
    EXPECT_LT(id, Streams::kStreams);
  }
}

TEST(Streams, EachThreadHasItsOwnCurrentOne) {
  Streams::Id before = Streams::exchange_current(3);
  Streams::Id seen = 9;
  std::thread([&] { seen = Streams::current(); }).join();
  EXPECT_EQ(seen, 0u);
  EXPECT_EQ(Streams::exchange_current(before), 3u);
}

TEST(Streams, SynchronizeThrowsWhatAnyOfThemMet) {
  auto streams = ok(Streams::create());
  streams->get(4).enqueue("", [] { throw std::runtime_error("there"); });
  EXPECT_THROW(streams->synchronize(), std::runtime_error);
  streams->synchronize();
}

}  // namespace
}  // namespace zinf::emulated
