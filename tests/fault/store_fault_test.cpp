// A failing disk under the store: every operation of a small run fails once, in
// every way; volumes are cut, swapped and damaged underneath.
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>

#include "src/base/align.h"
#include "src/tier/format.h"
#include "tests/support/buffer.h"
#include "tests/support/temp_dir.h"
#include "zinf/log.h"
#include "zinf/memory_disk.h"
#include "zinf/store.h"

namespace zinf {
namespace {

constexpr std::size_t kStates = 3;
constexpr std::uint64_t kBytes = 40'000;
constexpr std::size_t kBlock = 16 * kKiB;

StoreOptions options_on(std::shared_ptr<io::MemoryDisk> disk) {
  StoreOptions options;
  options.paths = {{.path = "run"}};
  options.durability = Durability::every_step();
  options.state_bytes = kStates * kBytes;
  options.num_states = kStates;
  options.block_bytes = kBlock;
  options.verify = Verify::kAlways;
  options.io = {.backend = io::Backend::kMemory,
                .disk = std::move(disk),
                .block_bytes = kBlock,
                .depth = 4};
  return options;
}

std::uint64_t seed_of(std::uint64_t step, std::size_t state) {
  return step * 100 + state;
}

Result<std::vector<StateId>> define_all(Store& store) {
  std::vector<StateId> ids;
  for (std::size_t i = 0; i < kStates; ++i) {
    ZINF_ASSIGN(StateId id, store.define({.unit = "u" + std::to_string(i),
                                          .state = "master",
                                          .dtype = "uint8",
                                          .shape = {kBytes},
                                          .bytes = kBytes}));
    ids.push_back(id);
  }
  return ids;
}

// One step: all puts in flight at once and not asked for, then the commit.
Status write_step(Store& store, std::uint64_t step) {
  ZINF_ASSIGN(std::vector<StateId> ids, define_all(store));
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<Store::Write> writes;
  for (std::size_t i = 0; i < kStates; ++i) {
    buffers.push_back(std::make_unique<Buffer>(kBytes, seed_of(step, i)));
    writes.push_back(store.put(ids[i], buffers[i]->span()));
  }
  return store.commit(step);
}

// The store grows; a state comes, is discarded, and goes.
Status grow_step(Store& store, std::uint64_t step) {
  StoreStats before = store.stats();
  Status grown = store.reserve((kStates + step) * kBytes, kStates + 1);
  StoreStats after = store.stats();
  if (!grown.ok() && (after.capacity_bytes != before.capacity_bytes ||
                      after.state_bytes != before.state_bytes)) {
    return Status::error(Code::kCorrupt, "a failed reserve has changed it");
  }
  ZINF_TRY(grown);
  ZINF_ASSIGN(StateId id, store.define({.unit = "t" + std::to_string(step),
                                        .state = "master",
                                        .dtype = "uint8",
                                        .shape = {kBytes},
                                        .bytes = kBytes}));
  Buffer data(kBytes, step);
  ZINF_TRY(store.put(id, data.span()).wait());
  ZINF_TRY(store.discard(id));
  ZINF_TRY(store.put(id, data.span()).wait());
  ZINF_TRY(store.commit(step));
  return store.remove(id);
}

Status read_step(Store& store, std::uint64_t step) {
  ZINF_ASSIGN(std::vector<StateId> ids, define_all(store));
  for (std::size_t i = 0; i < kStates; ++i) {
    Buffer got(kBytes, 1);
    ZINF_TRY(store.get(ids[i], got.span()).wait());
    if (!(got == Buffer(kBytes, seed_of(step, i)))) {
      return Status::error(Code::kCorrupt, "other bytes than were put");
    }
  }
  return {};
}

class Quiet {
 public:
  Quiet() { set_log_level(LogLevel::kOff); }
  ~Quiet() { set_log_level(before_); }

 private:
  LogLevel before_ = log_level();
};

struct FaultCase {
  const char* name;
  io::Fault fault;
  bool visible;  // short transfers are continued
};

class StoreFault : public testing::TestWithParam<FaultCase> {};

// Steps 1 and 2 are committed on a good disk; then the nth operation fails
// during steps 3 to 5, each with a read of everything and growth; one is kept.
TEST_P(StoreFault, AtEveryOperationTheErrorIsClearAndTheLastCommitStands) {
  Quiet quiet;
  auto good = std::make_shared<io::MemoryDisk>();
  {
    auto store = Store::create(options_on(good)).value();
    ASSERT_TRUE(write_step(*store, 1).ok());
    ASSERT_TRUE(write_step(*store, 2).ok());
  }
  std::uint64_t fired = 0;
  for (std::uint64_t nth = 1;; ++nth) {
    auto disk = good->after_crash(0);
    StoreOptions with = options_on(disk);
    with.io.faults = {GetParam().fault};
    with.io.faults[0].nth = nth;
    Status error;
    std::uint64_t committed = 2;
    {
      Result<std::unique_ptr<Store>> opened = Store::open(with);
      error = opened.status();
      for (std::uint64_t step = 3; error.ok() && step <= 5; ++step) {
        Store& store = **opened;
        error = write_step(store, step);
        if (error.ok()) committed = step;
        if (error.ok()) error = read_step(store, step);
        if (error.ok()) error = grow_step(store, step);
        if (error.ok() && step == 4) error = store.keep("four");
      }
      // The fault was a single one: going back heals, and work goes on.
      if (opened.ok() && !error.ok()) {
        Store& store = **opened;
        ASSERT_TRUE(store.rollback().ok());
        Status read = read_step(store, committed);
        ASSERT_TRUE(read.ok()) << nth << ": " << read.text();
        // A crash now finds the last commit: the failed one did not happen.
        for (std::uint64_t seed = 0; seed < 4; ++seed) {
          auto store2 = Store::open(options_on(disk->after_crash(seed)));
          ASSERT_TRUE(store2.ok()) << nth << ": " << store2.status().text();
          ASSERT_EQ((*store2)->versions().back().step, committed) << nth;
          ASSERT_TRUE(read_step(**store2, committed).ok()) << nth;
        }
        Status again = write_step(store, 9);
        ASSERT_TRUE(again.ok()) << nth << ": " << again.text();
        ASSERT_TRUE(read_step(store, 9).ok());
        committed = 9;
      }
    }
    if (!error.ok()) {
      ++fired;
      EXPECT_TRUE(GetParam().visible) << error.text();
      EXPECT_EQ(error.errnum(), GetParam().fault.errnum) << error.text();
      EXPECT_NE(error.text().find("run/volume.zinf"), std::string::npos)
          << error.text();
    }
    auto store = Store::open(options_on(disk));
    ASSERT_TRUE(store.ok()) << nth << ": " << store.status().text();
    ASSERT_EQ((*store)->versions().back().step, committed) << nth;
    ASSERT_TRUE(read_step(**store, committed).ok()) << nth;
    if (error.ok() && (GetParam().visible || nth > 60)) break;
  }
  if (GetParam().visible) {
    EXPECT_GE(fired, GetParam().fault.on == io::Operation::kResize ? 3u : 6u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, StoreFault,
    testing::Values(
        FaultCase{"WriteEio", {.on = io::Operation::kWrite}, true},
        FaultCase{"WriteEnospc",
                  {.on = io::Operation::kWrite, .errnum = ENOSPC},
                  true},
        FaultCase{"WriteTorn",
                  {.kind = io::Fault::Kind::kTorn, .on = io::Operation::kWrite},
                  true},
        FaultCase{
            "WriteShort",
            {.kind = io::Fault::Kind::kShort, .on = io::Operation::kWrite},
            false},
        FaultCase{"SyncEio", {.on = io::Operation::kSync}, true},
        FaultCase{"ResizeEnospc",
                  {.on = io::Operation::kResize, .errnum = ENOSPC},
                  true},
        FaultCase{"ReadEio", {.on = io::Operation::kRead}, true},
        FaultCase{"ReadShort",
                  {.kind = io::Fault::Kind::kShort, .on = io::Operation::kRead},
                  false}),
    [](const auto& param_info) { return param_info.param.name; });

TEST(StoreErrors, StickToTheStateUntilARollback) {
  Quiet quiet;
  auto disk = std::make_shared<io::MemoryDisk>();
  auto store = Store::create(options_on(disk)).value();
  ASSERT_TRUE(write_step(*store, 1).ok());
  store.reset();
  StoreOptions with = options_on(disk);
  with.io.faults = {{.on = io::Operation::kWrite, .nth = 2}};
  store = Store::open(with).value();
  std::vector<StateId> ids = define_all(*store).value();
  Buffer data(kBytes, 7);
  Status failed = store->put(ids[0], data.span()).wait();
  ASSERT_EQ(failed.errnum(), EIO);
  // Asked again in every way, it is the same cause.
  EXPECT_EQ(store->get(ids[0], data.span()).wait().errnum(), EIO);
  EXPECT_EQ(store->put(ids[0], data.span()).wait().errnum(), EIO);
  ASSERT_TRUE(store->put(ids[1], data.span()).wait().ok());
  Status commit = store->commit(2);
  EXPECT_EQ(commit.errnum(), EIO);
  EXPECT_NE(commit.text().find("version step 1 stands"), std::string::npos)
      << commit.text();
  EXPECT_NE(commit.text().find("u0/master"), std::string::npos)
      << commit.text();
  ASSERT_TRUE(store->rollback().ok());
  EXPECT_TRUE(read_step(*store, 1).ok());
  EXPECT_TRUE(write_step(*store, 2).ok());
}

TEST(StoreErrors, AFlippedBitInAnyReadIsToldWithItsPlaceOrChangesNothing) {
  Quiet quiet;
  auto disk = std::make_shared<io::MemoryDisk>();
  auto store = Store::create(options_on(disk)).value();
  ASSERT_TRUE(write_step(*store, 1).ok());
  store.reset();
  int told = 0;
  for (std::uint64_t nth = 1; nth <= 40; ++nth) {
    for (std::uint64_t seed : {1, 777, 4095}) {
      StoreOptions with = options_on(disk);
      with.io.faults = {{.kind = io::Fault::Kind::kFlip,
                         .on = io::Operation::kRead,
                         .nth = nth,
                         .seed = seed}};
      auto opened = Store::open(with);
      Status status = opened.status();
      if (opened.ok()) status = (*opened)->damage();  // of a superblock
      bool whole = status.ok();
      if (whole) status = read_step(**opened, 1);
      if (status.ok()) continue;  // no such read
      ++told;
      EXPECT_NE(status.text().find("run/volume.zinf"), std::string::npos)
          << nth << ": " << status.text();
      EXPECT_EQ(status.code(), Code::kCorrupt) << nth << ": " << status.text();
      EXPECT_TRUE(!whole || read_step(**opened, 1).ok()) << nth;
    }
  }
  EXPECT_GE(told, 9);
}

TEST(StoreErrors, AWriteThatNeverReachedTheDiskIsFoundByTheNextGet) {
  Quiet quiet;
  auto disk = std::make_shared<io::MemoryDisk>();
  auto store = Store::create(options_on(disk)).value();
  ASSERT_TRUE(write_step(*store, 1).ok());
  store.reset();
  StoreOptions with = options_on(disk);
  with.io.faults = {
      {.kind = io::Fault::Kind::kLost, .on = io::Operation::kWrite, .nth = 2}};
  store = Store::open(with).value();
  std::vector<StateId> ids = define_all(*store).value();
  Buffer data(kBytes, 7);
  ASSERT_TRUE(store->put(ids[0], data.span()).wait().ok());
  Status status = store->get(ids[0], data.span()).wait();
  EXPECT_EQ(status.code(), Code::kCorrupt) << status.text();
  EXPECT_NE(status.text().find("u0/master, block"), std::string::npos)
      << status.text();
}

// The kernel tells of a lost write once; a sync that succeeds later proves
// nothing about what was written before the one that failed.
TEST(StoreErrors, AfterAFailedSyncWhatWasPutIsNotTrusted) {
  Quiet quiet;
  auto disk = std::make_shared<io::MemoryDisk>();
  auto store = Store::create(options_on(disk)).value();
  ASSERT_TRUE(write_step(*store, 1).ok());
  store.reset();
  StoreOptions with = options_on(disk);
  with.io.faults = {{.on = io::Operation::kSync, .nth = 1}};
  store = Store::open(with).value();
  EXPECT_EQ(write_step(*store, 2).errnum(), EIO);
  EXPECT_EQ(store->commit(2).errnum(), EIO);  // the second sync would succeed
  ASSERT_TRUE(store->rollback().ok());
  EXPECT_TRUE(write_step(*store, 2).ok());
}

TEST(StoreErrors, ADiskThatDiesDuringACommitSaysWhenTheOutcomeIsOpen) {
  Quiet quiet;
  auto good = std::make_shared<io::MemoryDisk>();
  auto first = Store::create(options_on(good)).value();
  ASSERT_TRUE(write_step(*first, 1).ok());
  first.reset();
  int open = 0;
  int told = 0;
  for (std::uint64_t cut = 0;; ++cut) {
    auto disk = good->after_crash(0);
    auto store = Store::open(options_on(disk)).value();
    disk->cut_power_after(cut);
    Status status = write_step(*store, 2);
    if (status.ok()) break;
    ++told;
    EXPECT_EQ(status.errnum(), EIO);
    bool unsure = status.text().find("which of the two counts shows when") !=
                  std::string::npos;
    open += unsure ? 1 : 0;
    std::set<std::uint64_t> found;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      auto after = Store::open(options_on(disk->after_crash(seed)));
      ASSERT_TRUE(after.ok()) << after.status().text();
      found.insert((*after)->versions().back().step);
    }
    // Only when it said so can the commit have happened.
    if (!unsure) {
      EXPECT_EQ(found, std::set<std::uint64_t>{1}) << cut;
    }
  }
  EXPECT_EQ(open, 2);  // the superblock's write or its sync
  EXPECT_GT(told, 10);
}

// The same for growth.
TEST(StoreErrors, ADiskThatDiesWhileTheStoreGrowsLeavesTheOldRoomOrTheNew) {
  Quiet quiet;
  auto good = std::make_shared<io::MemoryDisk>();
  auto first = Store::create(options_on(good)).value();
  ASSERT_TRUE(write_step(*first, 1).ok());
  std::uint64_t old_bytes = first->stats().state_bytes;
  first.reset();
  constexpr std::uint64_t kNew = 10 * kBytes;
  int open = 0;
  for (std::uint64_t cut = 0;; ++cut) {
    auto disk = good->after_crash(0);
    auto store = Store::open(options_on(disk)).value();
    disk->cut_power_after(cut);
    Status status = store->reserve(kNew, 10);
    bool done = status.ok();
    bool unsure = status.text().find("which of the two counts shows when") !=
                  std::string::npos;
    open += unsure ? 1 : 0;
    if (!done) {
      EXPECT_EQ(status.errnum(), EIO);
      EXPECT_EQ(store->stats().state_bytes, old_bytes);
    }
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      auto after = Store::open(options_on(disk->after_crash(seed)));
      ASSERT_TRUE(after.ok()) << cut << ": " << after.status().text();
      std::uint64_t found = (*after)->stats().state_bytes;
      bool may_be_new = done || unsure;
      bool may_be_old = !done;
      EXPECT_TRUE((found == old_bytes && may_be_old) ||
                  (found == kNew && may_be_new))
          << cut << ": " << found;
      EXPECT_TRUE(read_step(**after, 1).ok());
      // What a crash left half done does not stop the next growth.
      Status again = (*after)->reserve(2 * kNew, 10);
      EXPECT_TRUE(again.ok()) << again.text();
      EXPECT_TRUE(write_step(**after, 2).ok());
    }
    if (done) break;
  }
  EXPECT_EQ(open, 2);  // the superblock's write or its sync
}

// While it is open which superblock counts, the files must suit both.
TEST(StoreErrors, AFileIsNotCutWhileASuperblockMayNeedItsNewSize) {
  Quiet quiet;
  auto disk = std::make_shared<io::MemoryDisk>();
  auto store = Store::create(options_on(disk)).value();
  ASSERT_TRUE(write_step(*store, 1).ok());
  std::uint64_t old_bytes = store->stats().state_bytes;
  store.reset();
  StoreOptions with = options_on(disk);
  // The superblock is written but not synced, the old one not written again;
  // and the next growth fails at once.
  with.io.faults = {{.on = io::Operation::kSync, .nth = 2},
                    {.on = io::Operation::kWrite, .nth = 2},
                    {.on = io::Operation::kResize, .errnum = ENOSPC, .nth = 2}};
  store = Store::open(with).value();
  EXPECT_EQ(store->reserve(10 * kBytes, 10).errnum(), EIO);
  EXPECT_EQ(store->reserve(20 * kBytes, 10).errnum(), ENOSPC);
  std::set<std::uint64_t> found;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    auto after = Store::open(options_on(disk->after_crash(seed)));
    ASSERT_TRUE(after.ok()) << after.status().text();
    found.insert((*after)->stats().state_bytes);
    EXPECT_TRUE(read_step(**after, 1).ok());
  }
  EXPECT_EQ(found, (std::set<std::uint64_t>{old_bytes, 10 * kBytes}));
  // The next superblock decides.
  ASSERT_TRUE(write_step(*store, 2).ok());
  store.reset();
  store = Store::open(options_on(disk)).value();
  EXPECT_EQ(store->stats().state_bytes, old_bytes);
  EXPECT_TRUE(read_step(*store, 2).ok());
}

TEST(StoreDamage, OneTornSuperblockLeavesTheOther) {
  for (std::uint64_t slot : {1, 2}) {
    auto disk = std::make_shared<io::MemoryDisk>();
    {
      auto store = Store::create(options_on(disk)).value();
      ASSERT_TRUE(write_step(*store, 1).ok());
      ASSERT_TRUE(write_step(*store, 2).ok());
    }
    disk->flip_bit("run/volume.zinf", slot * 4096 + 100);
    auto store = Store::open(options_on(disk));
    ASSERT_TRUE(store.ok()) << store.status().text();
    std::uint64_t step = (*store)->versions().back().step;
    EXPECT_TRUE(step == 1 || step == 2);
    EXPECT_TRUE(read_step(**store, step).ok());
    store.value().reset();
    disk->flip_bit("run/volume.zinf", (3 - slot) * 4096 + 100);
    Status both = Store::open(options_on(disk)).status();
    EXPECT_EQ(both.code(), Code::kCorrupt);
    EXPECT_NE(both.text().find("slot 0"), std::string::npos) << both.text();
    EXPECT_NE(both.text().find("slot 1"), std::string::npos) << both.text();
  }
}

// A bit flipped in any page of the volume: the store opens whole, or says what
// is wrong; with fall_back it opens at an intact version.
TEST(StoreDamage, ABadPageAnywhereIsToldOrFallenBackFrom) {
  Quiet quiet;
  auto good = std::make_shared<io::MemoryDisk>();
  std::uint64_t end = 0;
  {
    auto store = Store::create(options_on(good)).value();
    ASSERT_TRUE(write_step(*store, 1).ok());
    ASSERT_TRUE(store->keep("one").ok());
    ASSERT_TRUE(write_step(*store, 2).ok());
    StoreStats stats = store->stats();
    end =
        tier::kDataBegin + stats.capacity_bytes - stats.free_bytes + 512 * kKiB;
  }
  int told = 0;
  int fell_back = 0;
  int harmless = 0;
  for (std::uint64_t at = 0; at < end; at += 4096) {
    auto disk = good->after_crash(0);
    disk->flip_bit("run/volume.zinf", at + 1000 % 4096);
    Result<std::unique_ptr<Store>> store = Store::open(options_on(disk));
    Status error = store.status();
    if (store.ok()) {
      std::vector<Damage> damages = (*store)->verify().value();
      if (!damages.empty()) error = damages[0].error;
      store.value().reset();
    }
    if (error.ok()) {
      ++harmless;  // a page that nothing refers to, or the padding of one
      continue;
    }
    ++told;
    EXPECT_EQ(error.code(), Code::kCorrupt) << error.text();
    StoreOptions with = options_on(disk);
    with.fall_back = true;
    store = Store::open(with);
    if (at < 4096) {
      EXPECT_FALSE(store.ok());  // the volume's own header
      continue;
    }
    ASSERT_TRUE(store.ok()) << at << ": " << store.status().text();
    std::uint64_t newest = (*store)->versions().back().id;
    Result<VersionInfo> loaded = (*store)->load_intact(newest);
    ASSERT_TRUE(loaded.ok()) << at << ": " << loaded.status().text();
    EXPECT_TRUE(read_step(**store, loaded->step).ok()) << at;
    fell_back += loaded->step == 1 ? 1 : 0;
  }
  EXPECT_GT(told, 50);
  EXPECT_GT(fell_back, 20);
  EXPECT_GT(harmless, 20);
}

// --- Real files -------------------------------------------------------------

class StoreFiles : public testing::Test {
 protected:
  StoreOptions options() {
    StoreOptions options = options_on(nullptr);
    options.paths = {{.path = dir_.file("run")}};
    options.io.backend = io::Backend::kAuto;
    return options;
  }
  std::string volume() const { return dir_.file("run/volume.zinf"); }
  TempDir dir_;
};

TEST_F(StoreFiles, AFailedCreationLeavesNothingAtAnyOperation) {
  for (io::Operation on : {io::Operation::kRead, io::Operation::kWrite,
                           io::Operation::kSync, io::Operation::kCreate}) {
    std::uint64_t nth = 1;
    for (;; ++nth) {
      StoreOptions with = options();
      with.io.faults = {{.on = on, .nth = nth}};
      Status status = Store::create(with).status();
      if (status.ok()) break;
      EXPECT_EQ(status.errnum(), EIO) << status.text();
      EXPECT_FALSE(std::filesystem::exists(dir_.file("run"))) << status.text();
    }
    EXPECT_GT(nth, 1u);
    ASSERT_TRUE(remove_store({.path = dir_.file("run")}).ok());
  }
}

TEST_F(StoreFiles, AVolumeTruncatedUnderneathFailsTheCommit) {
  Quiet quiet;
  auto store = Store::create(options()).value();
  ASSERT_TRUE(write_step(*store, 1).ok());
  std::uint64_t bytes = std::filesystem::file_size(volume());
  std::filesystem::resize_file(volume(), bytes - 64 * kKiB);
  Status commit = write_step(*store, 2);
  EXPECT_FALSE(commit.ok());
  EXPECT_NE(commit.text().find("version step 1 stands"), std::string::npos)
      << commit.text();
  EXPECT_NE(commit.text().find("changed its size"), std::string::npos)
      << commit.text();
  Status grown = store->reserve(kMiB, 10);  // must not paper over it
  EXPECT_NE(grown.text().find("changed its size"), std::string::npos)
      << grown.text();
  store.reset();

  Status opened = Store::open(options()).status();
  EXPECT_EQ(opened.code(), Code::kCorrupt);
  EXPECT_NE(opened.text().find("is truncated"), std::string::npos)
      << opened.text();
  // What the cut did not reach can be read.
  StoreOptions looking = options();
  looking.access = Access::kRead;
  Result<std::unique_ptr<Store>> reader = Store::open(looking);
  ASSERT_TRUE(reader.ok()) << reader.status().text();
  EXPECT_EQ((*reader)->versions().back().step, 1u);
  Status read = read_step(**reader, 1);
  EXPECT_TRUE(read.ok()) << read.text();
}

TEST_F(StoreFiles, AnEmptiedVolumeFailsReadsAndCommits) {
  Quiet quiet;
  auto store = Store::create(options()).value();
  ASSERT_TRUE(write_step(*store, 1).ok());
  std::filesystem::resize_file(volume(), 0);
  Status read = read_step(*store, 1);
  EXPECT_EQ(read.code(), Code::kIo);
  EXPECT_NE(read.text().find("end of file"), std::string::npos) << read.text();
  EXPECT_FALSE(store->commit(2).ok());
}

TEST_F(StoreFiles, AVolumeThatWasReplacedFailsTheCommit) {
  Quiet quiet;
  auto store = Store::create(options()).value();
  ASSERT_TRUE(write_step(*store, 1).ok());
  std::filesystem::rename(volume(), volume() + ".old");
  Status gone = write_step(*store, 2);
  EXPECT_EQ(gone.errnum(), ENOENT) << gone.text();
  std::filesystem::copy(volume() + ".old", volume());
  Status other = store->commit(2);
  EXPECT_NE(other.text().find("was replaced"), std::string::npos)
      << other.text();
  std::filesystem::rename(volume() + ".old", volume());
  EXPECT_TRUE(store->commit(2).ok());
}

TEST_F(StoreFiles, AFormatFromTheFutureIsRefused) {
  {
    auto store = Store::create(options()).value();
  }
  std::fstream file(volume(), std::ios::in | std::ios::out | std::ios::binary);
  tier::Page page;
  file.read(reinterpret_cast<char*>(page.data()), page.size());
  page[8] = std::byte{2};  // the format's version
  tier::seal(page);
  file.seekp(0);
  file.write(reinterpret_cast<const char*>(page.data()), page.size());
  file.close();
  Status status = Store::open(options()).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.text().find("format 2"), std::string::npos) << status.text();
}

}  // namespace
}  // namespace zinf
