// What the store does, one behaviour at a time.
#include "zinf/store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "src/base/align.h"
#include "tests/support/store_fixture.h"

namespace zinf {
namespace {

TEST_F(StoreTest, GetsBackWhatWasPut) {
  auto store = made(Store::create(on_disk()));
  std::vector<std::uint64_t> sizes = {1,          4096,           4097, kBlock,
                                      kBlock + 1, 3 * kBlock + 5, 0};
  std::vector<StateId> ids;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    ids.push_back(define(*store, "u" + std::to_string(i), sizes[i]));
    ASSERT_TRUE(put(*store, ids[i], sizes[i], i).ok());
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_TRUE(holds(*store, ids[i], sizes[i], i)) << sizes[i];
  }
}

TEST_F(StoreTest, ACommittedVersionIsThereAfterOpening) {
  {
    auto store = made(Store::create(on_disk()));
    StateId a = define(*store, "a", 100'000);
    ASSERT_TRUE(put(*store, a, 100'000, 1).ok());
    std::vector<std::byte> extra(17, std::byte{7});
    ASSERT_TRUE(store->set_extra(extra).ok());
    ASSERT_TRUE(store->commit(5).ok());
    ASSERT_TRUE(store->keep("five").ok());
    ASSERT_TRUE(put(*store, a, 100'000, 2).ok());  // not committed
  }
  auto store = made(Store::open({.paths = {{.path = dir_.file("run")}}}));
  Result<StateId> a = store->find("a", "exp_avg");
  ASSERT_TRUE(a.ok());
  EXPECT_TRUE(holds(*store, *a, 100'000, 1));
  EXPECT_EQ(store->extra().value(), std::vector<std::byte>(17, std::byte{7}));
  ASSERT_EQ(store->versions().size(), 1u);
  VersionInfo version = store->versions()[0];
  EXPECT_EQ(version.step, 5u);
  EXPECT_EQ(version.names, std::vector<std::string>{"five"});
  EXPECT_EQ(version.bytes, 100'017u);
  EXPECT_EQ(store->states()[0], spec("a", 100'000));
  EXPECT_EQ(store->block_bytes(), kBlock);
}

TEST_F(StoreTest, DefinitionsAreFoundAgainAndConflictsRefused) {
  auto store = made(Store::create(options()));
  StateId a = define(*store, "a", 4096);
  EXPECT_EQ(define(*store, "a", 4096), a);
  EXPECT_EQ(store->define(spec("a", 8192)).status().code(), Code::kInvalid);
  EXPECT_EQ(store->define(spec("", 8192)).status().code(), Code::kInvalid);
  StateSpec shard = spec("b", 4096);
  shard.shard_index = 2;
  shard.shard_count = 2;
  EXPECT_EQ(store->define(shard).status().code(), Code::kInvalid);
  EXPECT_EQ(store->find("b", "exp_avg").status().code(), Code::kNotFound);
  EXPECT_EQ(store->define(spec("big", 64 * kMiB)).status().code(),
            Code::kNoSpace);
  EXPECT_EQ(put(*store, a, 100, 1).code(), Code::kInvalid);
  EXPECT_EQ(put(*store, {99}, 100, 1).code(), Code::kInvalid);
  Buffer buffer(4096);
  EXPECT_EQ(store->get(a, buffer.span()).wait().code(), Code::kNotFound);
}

TEST_F(StoreTest, RollbackReturnsToTheLastCommit) {
  auto store = made(Store::create(options()));
  StateId a = define(*store, "a", 5000);
  StateId b = define(*store, "b", 5000);
  ASSERT_TRUE(put(*store, a, 5000, 1).ok());
  ASSERT_TRUE(store->commit(1).ok());
  ASSERT_TRUE(put(*store, a, 5000, 2).ok());
  ASSERT_TRUE(put(*store, b, 5000, 3).ok());
  ASSERT_TRUE(store->rollback().ok());
  EXPECT_TRUE(holds(*store, a, 5000, 1));
  EXPECT_FALSE(store->has_content(b));
}

TEST_F(StoreTest, OnSaveStoresStatesOnceBetweenSaves) {
  StoreOptions with = options();
  with.kept = 0;
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", 2 * kMiB);
  for (std::uint64_t step = 1; step < 20; ++step) {
    ASSERT_TRUE(put(*store, a, 2 * kMiB, step).ok());
    ASSERT_TRUE(store->end_step(step).ok());
  }
  StoreStats stats = store->stats();
  EXPECT_EQ(stats.commits, 0u);
  EXPECT_EQ(stats.puts_in_place, 18u);
  EXPECT_EQ(stats.capacity_bytes - stats.free_bytes, 2 * kMiB);
}

TEST_F(StoreTest, EveryStepFitsIntoTwiceTheStates) {
  StoreOptions with = options();
  with.kept = 0;
  with.durability = Durability::every_step();
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", kMiB);
  StateId b = define(*store, "b", kMiB);
  for (std::uint64_t step = 1; step < 20; ++step) {
    for (StateId id : {a, b}) {
      Status status = put(*store, id, kMiB, step);
      ASSERT_TRUE(status.ok()) << status.text();
    }
    ASSERT_TRUE(store->end_step(step).ok());
    EXPECT_EQ(store->versions().size(), step == 1 ? 1u : 2u);
    EXPECT_EQ(store->versions().back().step, step);
  }
}

TEST_F(StoreTest, EveryKCommitsEveryKSteps) {
  StoreOptions with = options();
  with.durability = Durability::every_k(3);
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", kMiB);
  for (std::uint64_t step = 1; step <= 10; ++step) {
    ASSERT_TRUE(put(*store, a, kMiB, step).ok());
    ASSERT_TRUE(store->end_step(step).ok());
  }
  EXPECT_EQ(store->stats().commits, 3u);
  EXPECT_EQ(store->versions().back().step, 9u);
}

TEST_F(StoreTest, KeptVersionsShareUnchangedStates) {
  StoreOptions with = options();
  with.kept = 3;
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", kMiB);
  StateId b = define(*store, "b", 4096);
  ASSERT_TRUE(put(*store, a, kMiB, 1).ok());
  for (std::uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(put(*store, b, 4096, step).ok());
    ASSERT_TRUE(store->commit(step).ok());
    ASSERT_TRUE(store->keep("v" + std::to_string(step)).ok());
  }
  StoreStats stats = store->stats();
  EXPECT_EQ(stats.capacity_bytes - stats.free_bytes, kMiB + 3 * 4096);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    Result<VersionInfo> version =
        store->find_version("v" + std::to_string(step));
    ASSERT_TRUE(version.ok());
    ASSERT_TRUE(store->load(version->id).ok());
    EXPECT_TRUE(holds(*store, a, kMiB, 1));
    EXPECT_TRUE(holds(*store, b, 4096, step));
  }
  EXPECT_TRUE(store->drop("v1").ok());
  EXPECT_EQ(store->drop("v1").code(), Code::kNotFound);
  EXPECT_EQ(store->find_version("v1").status().code(), Code::kNotFound);
}

TEST_F(StoreTest, KeepRefusesMoreThanTheStoreWasMadeFor) {
  auto store = made(Store::create(options()));
  EXPECT_EQ(store->keep("none").code(), Code::kNotFound);
  StateId a = define(*store, "a", 4096);
  ASSERT_TRUE(put(*store, a, 4096, 1).ok());
  ASSERT_TRUE(store->commit(1).ok());
  ASSERT_TRUE(store->keep("one").ok());
  EXPECT_EQ(store->keep("one").code(), Code::kInvalid);
  EXPECT_TRUE(store->keep("uno").ok());  // the same version
  ASSERT_TRUE(store->commit(2).ok());
  Status refused = store->keep("two");
  EXPECT_EQ(refused.code(), Code::kNoSpace);
  EXPECT_NE(refused.text().find("drop one first"), std::string::npos);
}

// Two ranks: one has committed step 3, the other only step 2.
TEST_F(StoreTest, TheLastTwoCommitsStayUntilTheNextStep) {
  StoreOptions with = options();
  with.durability = Durability::every_step();
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", kMiB);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(put(*store, a, kMiB, step).ok());
    ASSERT_TRUE(store->end_step(step).ok());
  }
  std::vector<VersionInfo> versions = store->versions();
  ASSERT_EQ(versions.size(), 2u);
  ASSERT_EQ(versions[0].step, 2u);
  ASSERT_TRUE(store->load(versions[0].id).ok());
  EXPECT_TRUE(holds(*store, a, kMiB, 2));
  ASSERT_TRUE(store->begin_step().ok());  // step 3 is not the agreed one
  ASSERT_EQ(store->versions().size(), 1u);
  EXPECT_EQ(store->versions()[0].step, 2u);
  store.reset();
  store = made(Store::open(with));
  EXPECT_TRUE(holds(*store, store->find("a", "exp_avg").value(), kMiB, 2));
}

TEST_F(StoreTest, AMismatchNamesEverythingAndFallBackTakesAnIntactVersion) {
  auto store = made(Store::create(options()));
  StateId a = define(*store, "a", 3 * kBlock);
  ASSERT_TRUE(put(*store, a, 3 * kBlock, 1).ok());
  ASSERT_TRUE(store->commit(1).ok());
  ASSERT_TRUE(put(*store, a, 3 * kBlock, 2).ok());
  ASSERT_TRUE(store->commit(2).ok());
  store.reset();
  store = made(Store::open(options()));
  std::vector<Damage> damages = store->verify().value();
  EXPECT_TRUE(damages.empty());

  // Finds the block by trying: flips bits of the volume until version 2 fails.
  bool hit = false;
  for (std::uint64_t at = kMiB / 2; !hit && at < 2 * kMiB; at += kBlock) {
    disk_->flip_bit("run/volume.zinf", at);
    damages = store->verify().value();
    hit = damages.size() == 1 && damages[0].version == "step 2";
    if (!hit) disk_->flip_bit("run/volume.zinf", at);
  }
  ASSERT_TRUE(hit);
  std::string text = damages[0].error.text();
  for (const char* part : {"a/exp_avg", "block ", "run/volume.zinf at offset ",
                           "version step 2", "wanted ", "got "}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  Buffer buffer(3 * kBlock);
  EXPECT_EQ(store->get(a, buffer.span()).wait().code(), Code::kCorrupt);

  std::uint64_t newest = store->versions().back().id;
  testing::internal::CaptureStderr();
  Result<VersionInfo> loaded = store->load_intact(newest);
  std::string said = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(loaded.ok()) << loaded.status().text();
  EXPECT_EQ(loaded->step, 1u);
  EXPECT_NE(said.find("falling back to version step 1"), std::string::npos);
  EXPECT_TRUE(holds(*store, a, 3 * kBlock, 1));
  // The intact one is the one that stays.
  ASSERT_TRUE(store->begin_step().ok());
  ASSERT_EQ(store->versions().size(), 1u);
  EXPECT_EQ(store->versions()[0].step, 1u);
}

TEST_F(StoreTest, VerifyOptionsDecideWhenChecksumsAreCompared) {
  for (Verify verify : {Verify::kAlways, Verify::kOnLoad, Verify::kNever}) {
    disk_ = std::make_shared<io::MemoryDisk>();
    StoreOptions with = options();
    with.verify = verify;
    auto store = made(Store::create(with));
    StateId a = define(*store, "a", kBlock);
    ASSERT_TRUE(put(*store, a, kBlock, 1).ok());
    std::uint64_t made_sums = verify == Verify::kNever ? 0 : kBlock;
    EXPECT_EQ(store->stats().checksum_bytes, made_sums);
    ASSERT_TRUE(holds(*store, a, kBlock, 1));
    EXPECT_EQ(store->stats().checksum_bytes,
              verify == Verify::kAlways ? 2 * kBlock : made_sums);
    ASSERT_TRUE(store->commit(1).ok());
    store.reset();
    store = made(Store::open(with));
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(holds(*store, a, kBlock, 1));
    std::uint64_t compared = verify == Verify::kAlways   ? 3 * kBlock
                             : verify == Verify::kOnLoad ? kBlock
                                                         : 0;
    EXPECT_EQ(store->stats().checksum_bytes, compared);
  }
}

TEST_F(StoreTest, PutsAndGetsOfOneStateAreOrdered) {
  StoreOptions with = on_disk();
  with.kept = 0;
  with.verify = Verify::kAlways;
  auto store = made(Store::create(with));
  StateId a = define(*store, "a", 2 * kMiB);
  Buffer first(2 * kMiB, 1);
  Buffer second(2 * kMiB, 2);
  Buffer third(2 * kMiB, 3);
  for (int round = 0; round < 5; ++round) {
    Buffer got(2 * kMiB);
    Buffer later(2 * kMiB);
    Store::Write one = store->put(a, first.span());
    Store::Write two = store->put(a, second.span());
    Store::Read read = store->get(a, got.span());
    Store::Write three = store->put(a, third.span());
    Store::Read last = store->get(a, later.span());
    ASSERT_TRUE(last.wait().ok());
    ASSERT_TRUE(read.wait().ok());
    EXPECT_TRUE(got == second);
    EXPECT_TRUE(later == third);
    EXPECT_TRUE(one.wait().ok() && two.wait().ok() && three.wait().ok());
  }
}

TEST_F(StoreTest, ThreadsShareAStoreWhileItCommits) {
  StoreOptions with = on_disk();
  with.durability = Durability::every_step();
  auto store = made(Store::create(with));
  constexpr std::size_t kThreads = 3;
  std::vector<StateId> ids;
  for (std::size_t i = 0; i < kThreads; ++i) {
    ids.push_back(define(*store, "t" + std::to_string(i), 300'000));
  }
  std::vector<std::thread> threads;
  std::vector<int> good(kThreads, 0);
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t round = 0; round < 20; ++round) {
        bool well = put(*store, ids[t], 300'000, t * 100 + round).ok() &&
                    holds(*store, ids[t], 300'000, t * 100 + round);
        good[t] += well ? 1 : 0;
      }
    });
  }
  for (std::uint64_t step = 1; step <= 20; ++step) {
    Status status = store->commit(step);
    EXPECT_TRUE(status.ok()) << status.text();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, std::vector<int>(kThreads, 20));
  ASSERT_TRUE(store->commit(21).ok());
  store.reset();
  store = made(Store::open(with));
  for (std::size_t t = 0; t < kThreads; ++t) {
    EXPECT_TRUE(holds(*store, ids[t], 300'000, t * 100 + 19));
  }
}

// --- Files ------------------------------------------------------------------

TEST_F(StoreTest, DirectoriesAndFilesArePrivateAndNeverGrow) {
  auto store = made(Store::create(on_disk()));
  struct stat directory{};
  struct stat before{};
  std::string file = dir_.file("run/volume.zinf");
  ASSERT_EQ(stat(dir_.file("run").c_str(), &directory), 0);
  ASSERT_EQ(stat(file.c_str(), &before), 0);
  EXPECT_EQ(directory.st_mode & 0777, 0700u);
  EXPECT_EQ(before.st_mode & 0777, 0600u);
  StateId a = define(*store, "a", kMiB);
  StateId b = define(*store, "b", 777'777);
  for (std::uint64_t step = 1; step <= 30; ++step) {
    ASSERT_TRUE(put(*store, a, kMiB, step).ok());
    ASSERT_TRUE(put(*store, b, 777'777, step).ok());
    ASSERT_TRUE(store->commit(step).ok());
  }
  struct stat after{};
  ASSERT_EQ(stat(file.c_str(), &after), 0);
  EXPECT_EQ(after.st_size, before.st_size);
  EXPECT_EQ(after.st_blocks, before.st_blocks);
}

TEST_F(StoreTest, ASecondOpenerIsRefusedWithTheOwnersPid) {
  auto store = made(Store::create(on_disk()));
  Status second = Store::open(on_disk()).status();
  EXPECT_EQ(second.code(), Code::kPermission);
  EXPECT_NE(second.text().find(std::to_string(getpid())), std::string::npos)
      << second.text();
  EXPECT_EQ(Store::create(on_disk()).status().code(), Code::kPermission);
  ASSERT_EQ(find_stores(dir_.path()).size(), 1u);
  EXPECT_EQ(find_stores(dir_.path())[0].owner, getpid());
  EXPECT_EQ(remove_store({.path = dir_.file("run")}).code(), Code::kPermission);

  StoreOptions looking = on_disk();
  looking.access = Access::kRead;
  auto reader = made(Store::open(looking));
  EXPECT_EQ(reader->commit(1).code(), Code::kInvalid);
  reader.reset();

  store.reset();
  EXPECT_EQ(find_stores(dir_.path())[0].owner, 0);
  EXPECT_EQ(Store::create(on_disk()).status().code(), Code::kInvalid);
  EXPECT_TRUE(remove_store({.path = dir_.file("run")}).ok());
  EXPECT_FALSE(std::filesystem::exists(dir_.file("run")));
}

TEST_F(StoreTest, ADiskTooSmallIsRefusedWithWhatEachPathNeedsAndHas) {
  StoreOptions with = on_disk();
  with.paths = {{.path = dir_.file("a"), .limit_bytes = kMiB, .weight = 1},
                {.path = dir_.file("b"), .limit_bytes = kMiB, .weight = 1}};
  with.state_bytes = 4 * kMiB;
  Status refused = Store::create(with).status();
  EXPECT_EQ(refused.code(), Code::kNoSpace);
  EXPECT_NE(refused.text().find("/a: "), std::string::npos) << refused.text();
  EXPECT_NE(refused.text().find("1 MiB found"), std::string::npos);
  EXPECT_NE(refused.text().find("name more paths or keep fewer versions"),
            std::string::npos);
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
  with.state_bytes = std::uint64_t{1} << 50;
  with.paths = {{.path = dir_.file("a")}};
  EXPECT_EQ(Store::create(with).status().code(), Code::kNoSpace);
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
}

// As engine.save() makes one.
TEST_F(StoreTest, ASaveThatDoesNotFitIsToldWhatItCanDo) {
  StoreOptions with = on_disk();
  with.durability = Durability::written_once();
  with.paths = {{.path = dir_.file("step-1"), .limit_bytes = kMiB}};
  with.state_bytes = 4 * kMiB;
  std::string text = Store::create(with).status().text();
  for (const char* part :
       {"the store needs 4", "/step-1: ", " MiB needed, 1 MiB found",
        "; free space or save elsewhere"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_EQ(text.find("paths"), std::string::npos) << text;
}

TEST_F(StoreTest, TheExtraIsNotCountedAmongTheStatesOfAVersion) {
  auto store = made(Store::create(options()));
  StateId a = define(*store, "a", 4096);
  ASSERT_TRUE(put(*store, a, 4096, 1).ok());
  Buffer extra(100, 2);
  ASSERT_TRUE(store->set_extra(extra.span()).ok());
  ASSERT_TRUE(store->commit(1).ok());
  VersionInfo version = store->versions().back();
  EXPECT_EQ(version.num_states, store->contents(version.id)->size());
  EXPECT_EQ(version.bytes, 4096u + 100u);
}

TEST_F(StoreTest, AReaderIsToldThatAFileIsTruncated) {
  auto store = made(Store::create(on_disk()));
  StateId a = define(*store, "a", kMiB);
  ASSERT_TRUE(put(*store, a, kMiB, 1).ok());
  ASSERT_TRUE(store->commit(1).ok());
  store.reset();
  std::string file = dir_.file("run/volume.zinf");
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 4096);
  StoreOptions reader = on_disk();
  reader.access = Access::kRead;
  Status damage = made(Store::open(reader))->damage();
  EXPECT_EQ(damage.code(), Code::kCorrupt);
  EXPECT_NE(damage.text().find("volume.zinf is truncated"), std::string::npos)
      << damage.text();
}

TEST_F(StoreTest, APathWithoutRoomForItsShareLeavesTheRestToTheOthers) {
  StoreOptions with = on_disk();
  with.paths = {{.path = dir_.file("a"), .weight = 1},
                {.path = dir_.file("b"), .limit_bytes = kMiB, .weight = 1}};
  auto store = made(Store::create(with));
  EXPECT_LE(std::filesystem::file_size(dir_.file("b/volume.zinf")), kMiB);
  EXPECT_GE(store->stats().capacity_bytes, with.data_bytes());
}

TEST_F(StoreTest, VolumesOfAnotherStoreOrAMissingOneAreRefused) {
  StoreOptions with = on_disk();
  StorePath a{.path = dir_.file("a"), .weight = 1};
  StorePath b{.path = dir_.file("b"), .weight = 1};
  StorePath c{.path = dir_.file("c"), .weight = 1};
  with.paths = {a, b};
  {
    auto store = made(Store::create(with));
    StateId id = define(*store, "a", kMiB);
    ASSERT_TRUE(put(*store, id, kMiB, 1).ok());
    ASSERT_TRUE(store->commit(1).ok());
  }
  with.paths = {c};
  made(Store::create(with)).reset();
  auto status_of = [&](std::vector<StorePath> paths) {
    with.paths = std::move(paths);
    return Store::open(with).status();
  };
  EXPECT_EQ(status_of({a}).code(), Code::kNotFound);
  EXPECT_NE(status_of({a}).text().find("volume 1 of the 2"), std::string::npos);
  EXPECT_EQ(status_of({b}).code(), Code::kNotFound);
  EXPECT_EQ(status_of({a, c}).code(), Code::kInvalid);
  EXPECT_EQ(status_of({a, a}).code(), Code::kPermission);  // locked by itself
  EXPECT_EQ(status_of({{.path = dir_.file("none")}}).code(), Code::kNotFound);
  with.paths = {b, a};  // any order
  auto store = made(Store::open(with));
  EXPECT_EQ(store->paths()[0], dir_.file("a"));
  EXPECT_TRUE(holds(*store, store->find("a", "exp_avg").value(), kMiB, 1));
}

TEST_F(StoreTest, WhatIsNotAVolumeIsRefused) {
  std::filesystem::create_directory(dir_.file("run"));
  std::ofstream(dir_.file("run/volume.zinf")) << std::string(8192, 'x');
  Status status = Store::open(on_disk()).status();
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_NE(status.text().find("not a volume header"), std::string::npos);
  std::ofstream(dir_.file("run/volume.zinf")) << "x";
  EXPECT_EQ(Store::open(on_disk()).status().code(), Code::kCorrupt);
}

TEST_F(StoreTest, AStoreMadeForSavesIsNotOpenedForEveryStep) {
  made(Store::create(options())).reset();
  StoreOptions with = options();
  with.durability = Durability::every_step();
  EXPECT_EQ(Store::open(with).status().code(), Code::kNoSpace);
}

TEST_F(StoreTest, StripesFollowTheWeights) {
  StoreOptions with = options();
  with.paths = {{.path = "fast", .weight = 3}, {.path = "slow", .weight = 1}};
  with.state_bytes = 8 * kMiB;
  auto store = made(Store::create(with));
  std::vector<StateId> ids;
  for (int i = 0; i < 8; ++i) {
    ids.push_back(define(*store, "u" + std::to_string(i), kMiB - 100));
  }
  for (StateId id : ids)
    ASSERT_TRUE(put(*store, id, kMiB - 100, id.index).ok());
  for (StateId id : ids) EXPECT_TRUE(holds(*store, id, kMiB - 100, id.index));
  std::vector<std::uint64_t> put_bytes = store->stats().volume_bytes_put;
  double ratio =
      static_cast<double>(put_bytes[0]) / static_cast<double>(put_bytes[1]);
  EXPECT_NEAR(ratio, 3, 0.1);
  EXPECT_EQ(store->weights(), (std::vector<double>{3, 1}));
}

TEST_F(StoreTest, WeightsAreMeasuredWhenNoneAreGiven) {
  StoreOptions with = on_disk();
  // Far below any disk that this runs on.
  io::Fault slow{.kind = io::Fault::Kind::kRate,
                 .on = io::Operation::kWrite,
                 .bytes_per_second = 100e6};
  with.paths = {{.path = dir_.file("a")},
                {.path = dir_.file("b"), .faults = {slow}}};
  auto store = made(Store::create(with));
  EXPECT_GT(store->weights()[0], 0);
  EXPECT_GT(store->weights()[1], 0);
  EXPECT_LT(store->weights()[1], 0.2);  // twice 0.1 GB/s at most
}

// Speed as a ratio within one run, the median of three: the limits, far below
// what any machine does, decide it.
TEST_F(StoreTest, ASlowPathCostsItsShareNotTheWhole) {
  constexpr std::uint64_t kState = 64 * kKiB;
  constexpr double kRate = 12e6;
  auto rate_of = [&](std::vector<StorePath> paths, std::size_t count) {
    disk_ = std::make_shared<io::MemoryDisk>();
    StoreOptions with = options();
    with.paths = std::move(paths);
    with.block_bytes = 16 * kKiB;
    with.io.block_bytes = 16 * kKiB;
    with.num_states = count;
    with.state_bytes = count * kState;
    with.verify = Verify::kNever;
    auto store = made(Store::create(with));
    Buffer data(kState, 1);
    std::vector<StateId> ids;
    for (std::size_t i = 0; i < count; ++i) {
      ids.push_back(define(*store, std::to_string(i), kState));
    }
    auto begin = std::chrono::steady_clock::now();
    std::vector<Store::Write> writes;
    for (StateId id : ids) writes.push_back(store->put(id, data.span()));
    for (Store::Write& write : writes) EXPECT_TRUE(write.wait().ok());
    std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - begin;
    return static_cast<double>(count * kState) / took.count();
  };
  auto path = [&](const char* name, double share) {
    return StorePath{.path = name,
                     .weight = share,
                     .faults = {{.kind = io::Fault::Kind::kRate,
                                 .on = io::Operation::kWrite,
                                 .bytes_per_second = kRate * share}}};
  };
  std::vector<double> ratios;
  for (int round = 0; round < 3; ++round) {
    double fast = rate_of({path("fast", 1)}, 60);
    double slow = rate_of({path("slow", 0.1)}, 6);
    double both = rate_of({path("fast", 1), path("slow", 0.1)}, 60);
    ratios.push_back(both / (fast + slow));
  }
  std::sort(ratios.begin(), ratios.end());
  EXPECT_GT(ratios[1], 0.9) << ratios[0] << " to " << ratios[2];
}

TEST(StoreOptions, CapacityFollowsTheFormula) {
  StoreOptions options;
  options.state_bytes = 100 * kMiB;
  options.extra_bytes = 0;
  for (int kept : {0, 1, 5}) {
    options.kept = kept;
    auto copies = static_cast<std::uint64_t>(kept);
    options.durability = Durability::on_save();
    EXPECT_EQ(options.data_bytes(), (1 + copies) * 100 * kMiB);
    options.durability = Durability::every_step();
    EXPECT_EQ(options.data_bytes(), (2 + copies) * 100 * kMiB);
    options.durability = Durability::every_k(4);
    EXPECT_EQ(options.data_bytes(), (2 + copies) * 100 * kMiB);
    options.durability = Durability::written_once();
    EXPECT_EQ(options.data_bytes(), copies * 100 * kMiB);
  }
}

TEST_F(StoreTest, WhatIsWrittenOnceNeedsItsOwnRoomOnly) {
  StoreOptions once = options();
  once.durability = Durability::written_once();
  once.state_bytes = kMiB;
  once.num_states = 1;
  {
    auto store = made(Store::create(once));
    EXPECT_LT(store->stats().capacity_bytes, 2 * kMiB);
    StateId id = define(*store, "a", kMiB);
    ASSERT_TRUE(put(*store, id, kMiB, 1).ok());
    ASSERT_TRUE(store->commit(7).ok());
    ASSERT_TRUE(store->keep("checkpoint").ok());
    EXPECT_EQ(put(*store, id, kMiB, 2).code(), Code::kNoSpace);
  }
  auto store = made(Store::open(once));
  EXPECT_TRUE(holds(*store, store->find("a", "exp_avg").value(), kMiB, 1));
  once.kept = 0;
  EXPECT_EQ(once.validate().code(), Code::kInvalid);
}

TEST(StoreOptions, EveryProblemIsTold) {
  StoreOptions options;
  options.block_bytes = 1000;
  options.kept = -1;
  options.io.depth = 0;
  std::string text = options.validate().text();
  for (const char* part : {"no path", "block is 1000", "kept is -1", "depth"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace zinf
