// States that come and go.
#include <cerrno>

#include "tests/support/store_fixture.h"

namespace zinf {
namespace {

using StoreStates = StoreTest;

TEST_F(StoreStates, ADiscardedContentIsGoneFromTheWorkingVersionOnly) {
  auto store = made(Store::create(options()));
  StateId a = define(*store, "a", kMiB);
  ASSERT_TRUE(put(*store, a, kMiB, 1).ok());
  ASSERT_TRUE(store->commit(1).ok());
  ASSERT_TRUE(store->discard(a).ok());
  EXPECT_FALSE(store->has_content(a));
  EXPECT_EQ(store->find("a", "exp_avg").value(), a);
  Buffer got(kMiB);
  EXPECT_EQ(store->get(a, got.span()).wait().code(), Code::kNotFound);
  EXPECT_TRUE(store->discard(a).ok());  // there is nothing to do
  ASSERT_TRUE(store->rollback().ok());
  EXPECT_TRUE(holds(*store, a, kMiB, 1));

  ASSERT_TRUE(store->discard(a).ok());
  ASSERT_TRUE(store->commit(2).ok());
  EXPECT_EQ(store->versions().back().num_states, 0u);
  store.reset();
  store = made(Store::open(options()));
  EXPECT_EQ(store->find("a", "exp_avg").value(), a);
  EXPECT_FALSE(store->has_content(a));
  EXPECT_EQ(store->discard({99}).code(), Code::kInvalid);
  EXPECT_EQ(store->discard({0}).code(), Code::kInvalid);
}

TEST_F(StoreStates, ARemovedStateLeavesItsNameRoomAndSpaceToOthers) {
  StoreOptions with = options();
  with.num_states = 2;
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", kMiB);
  define(*store, "b", kMiB);
  ASSERT_TRUE(put(*store, a, kMiB, 1).ok());
  std::uint64_t free = store->stats().free_bytes;
  EXPECT_EQ(store->define(spec("c", 4096)).status().code(), Code::kNoSpace);

  ASSERT_TRUE(store->remove(a).ok());
  EXPECT_EQ(store->stats().free_bytes, free + kMiB);
  EXPECT_FALSE(store->has_content(a));
  EXPECT_EQ(store->find("a", "exp_avg").status().code(), Code::kNotFound);
  EXPECT_EQ(store->states(), (std::vector<StateSpec>{spec("b", kMiB)}));
  Buffer buffer(kMiB);
  EXPECT_EQ(store->put(a, buffer.span()).wait().code(), Code::kInvalid);
  EXPECT_EQ(store->get(a, buffer.span()).wait().code(), Code::kInvalid);
  EXPECT_EQ(store->remove(a).code(), Code::kInvalid);
  EXPECT_EQ(store->discard(a).code(), Code::kInvalid);

  StateId again = define(*store, "a", 500'000);  // with another shape
  EXPECT_NE(again, a);
  EXPECT_FALSE(store->has_content(again));
  ASSERT_TRUE(put(*store, again, 500'000, 2).ok());
  EXPECT_TRUE(holds(*store, again, 500'000, 2));
}

TEST_F(StoreStates, AVersionBringsBackWhatWasRemoved) {
  StoreOptions with = options();
  with.kept = 2;
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", kMiB);
  StateId b = define(*store, "b", 4096);
  ASSERT_TRUE(put(*store, a, kMiB, 1).ok());
  ASSERT_TRUE(put(*store, b, 4096, 2).ok());
  ASSERT_TRUE(store->commit(1).ok());
  ASSERT_TRUE(store->keep("with a").ok());
  std::uint64_t old = store->versions().back().id;
  std::uint64_t free = store->stats().free_bytes;
  ASSERT_TRUE(store->remove(a).ok());
  EXPECT_EQ(store->stats().free_bytes, free);  // the version has it
  ASSERT_TRUE(store->commit(2).ok());
  EXPECT_EQ(store->contents(old)->size(), 2u);
  EXPECT_EQ(store->contents(store->versions().back().id).value(),
            (std::vector<StateSpec>{spec("b", 4096)}));
  EXPECT_TRUE(store->verify()->empty());
  EXPECT_NE(define(*store, "c", 8192), a);  // the index is still needed

  auto check = [&] {
    Status loaded = store->load(old);
    ASSERT_TRUE(loaded.ok()) << loaded.text();
    EXPECT_EQ(define(*store, "a", kMiB), a);
    EXPECT_TRUE(holds(*store, a, kMiB, 1));
    EXPECT_TRUE(holds(*store, store->find("b", "exp_avg").value(), 4096, 2));
  };
  check();
  store.reset();
  store = made(Store::open(with));
  EXPECT_EQ(store->states(), (std::vector<StateSpec>{spec("b", 4096)}));
  EXPECT_EQ(store->contents(old)->size(), 2u);
  a = define(*store, "a", kMiB);  // as it was: the same index again
  EXPECT_FALSE(store->has_content(a));
  check();

  // Gone with its last version.
  ASSERT_TRUE(store->rollback().ok());
  EXPECT_TRUE(store->remove(a).ok());
  free = store->stats().free_bytes;
  ASSERT_TRUE(store->drop("with a").ok());
  ASSERT_TRUE(store->begin_step().ok());
  EXPECT_EQ(store->stats().free_bytes, free + kMiB);
  EXPECT_EQ(define(*store, "d", 8192), a);
}

TEST_F(StoreStates, AVersionThatDoesNotFitBesideWhatIsDefinedIsNotLoaded) {
  StoreOptions with = options();
  with.num_states = 2;
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", 4096);
  StateId b = define(*store, "b", 4096);
  ASSERT_TRUE(put(*store, a, 4096, 1).ok());
  ASSERT_TRUE(put(*store, b, 4096, 2).ok());
  ASSERT_TRUE(store->commit(1).ok());
  std::uint64_t version = store->versions().back().id;
  ASSERT_TRUE(store->remove(a).ok());
  StateId other = define(*store, "a", 8192);
  ASSERT_TRUE(put(*store, other, 8192, 3).ok());
  ASSERT_TRUE(put(*store, b, 4096, 4).ok());
  for (const Status& refused : {store->rollback(), store->load(version),
                                store->load_intact(version).status()}) {
    EXPECT_EQ(refused.code(), Code::kInvalid);
    EXPECT_NE(refused.text().find("a/exp_avg"), std::string::npos)
        << refused.text();
  }
  EXPECT_TRUE(holds(*store, other, 8192, 3));  // nothing has changed
  EXPECT_TRUE(holds(*store, b, 4096, 4));

  ASSERT_TRUE(store->remove(other).ok());
  StateId c = define(*store, "c", 8192);
  Status full = store->rollback();
  EXPECT_EQ(full.code(), Code::kNoSpace);
  EXPECT_NE(full.text().find("room for 2 states"), std::string::npos)
      << full.text();
  EXPECT_TRUE(holds(*store, b, 4096, 4));
  ASSERT_TRUE(store->remove(c).ok());
  ASSERT_TRUE(store->rollback().ok());
  EXPECT_TRUE(holds(*store, a, 4096, 1));
  EXPECT_TRUE(holds(*store, b, 4096, 2));
}

TEST_F(StoreStates, AFailedPutIsForgottenWithItsContent) {
  StoreOptions with = options();
  with.io.faults = {{.on = io::Operation::kWrite, .nth = 3}};
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", 4096);
  StateId b = define(*store, "b", 4096);
  EXPECT_EQ(put(*store, a, 4096, 1).errnum(), EIO);
  ASSERT_TRUE(put(*store, b, 4096, 2).ok());
  EXPECT_EQ(store->commit(1).errnum(), EIO);
  ASSERT_TRUE(store->discard(a).ok());
  ASSERT_TRUE(store->commit(1).ok());
  ASSERT_TRUE(put(*store, a, 4096, 3).ok());
  EXPECT_TRUE(holds(*store, a, 4096, 3));
  EXPECT_TRUE(holds(*store, b, 4096, 2));
}

TEST_F(StoreStates, RemoveWaitsForWhatIsUnderWay) {
  StoreOptions with = on_disk();
  with.verify = Verify::kAlways;
  auto store = made(Store::create(with));
  Buffer data(kMiB, 1);
  for (int round = 0; round < 20; ++round) {
    StateId a = define(*store, "a", kMiB);
    ASSERT_TRUE(put(*store, a, kMiB, 1).ok());
    std::uint64_t free = store->stats().free_bytes;
    Buffer got(kMiB, 2);
    Store::Read read = store->get(a, got.span());
    Store::Write write = store->put(a, data.span());
    ASSERT_TRUE(store->remove(a).ok());
    EXPECT_EQ(store->stats().free_bytes, free + kMiB);
    EXPECT_TRUE(write.wait().ok());
    EXPECT_TRUE(read.wait().ok());
    EXPECT_TRUE(got == data);
  }
}

// What grows with the history and not with the states would show: indexes,
// space, the table of a commit.
TEST_F(StoreStates, TenThousandStatesComeAndGoInTheRoomOfAFew) {
  StoreOptions with = options();
  with.num_states = 4;
  with.state_bytes = 64 * kKiB;
  with.verify = Verify::kNever;
  auto store = made(Store::create(with));
  StateId stays = define(*store, "stays", 4096);
  ASSERT_TRUE(put(*store, stays, 4096, 7).ok());
  std::uint32_t highest = 0;
  std::uint64_t volume = volume_bytes("run");
  Buffer data(20'000, 1);
  for (std::uint64_t i = 0; i < 10'000; ++i) {
    // Names and sizes repeat, but not together.
    std::uint64_t bytes = 1 + i % 1999;
    StateId id = define(*store, "u" + std::to_string(i % 7), bytes);
    ASSERT_TRUE(store->put(id, data.span().first(bytes)).wait().ok());
    highest = std::max(highest, id.index);
    if (i % 50 == 0) {
      Status committed = store->commit(i);
      ASSERT_TRUE(committed.ok()) << i << ": " << committed.text();
    }
    if (i % 300 == 0) {
      ASSERT_TRUE(i == 0 || store->drop("kept").ok());
      ASSERT_TRUE(store->keep("kept").ok());
    }
    ASSERT_TRUE(store->remove(id).ok());
  }
  // One per version that may be there, the working one, the one that stays, and
  // one that a name just had.
  EXPECT_LE(highest, 7u);
  EXPECT_EQ(volume_bytes("run"), volume);
  ASSERT_TRUE(store->drop("kept").ok());
  ASSERT_TRUE(store->begin_step().ok());
  ASSERT_TRUE(store->commit(10'000).ok());
  ASSERT_TRUE(store->begin_step().ok());
  StoreStats stats = store->stats();
  EXPECT_EQ(stats.capacity_bytes - stats.free_bytes, 4096u);
  EXPECT_EQ(store->contents(store->versions().back().id)->size(), 1u);
  EXPECT_TRUE(holds(*store, stays, 4096, 7));
}

}  // namespace
}  // namespace zinf
