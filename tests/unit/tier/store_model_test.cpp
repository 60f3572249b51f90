// Random histories of a store against a model, with crashes anywhere; and one
// history with a crash at every single operation.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <functional>

#include "tests/support/store_model.h"
#include "zinf/log.h"

namespace zinf {
namespace {

// One random operation. A cut takes effect in a later one.
std::string random_step(StoreDriver& driver, CrashableDisk& disk,
                        bool reopen_to_cut) {
  auto unit = [] { return "u" + std::to_string(*rc::gen::inRange(0, 8)); };
  auto name = [] { return "n" + std::to_string(*rc::gen::inRange(0, 3)); };
  auto seed = [] {
    return *rc::gen::inRange<std::uint64_t>(0, std::uint64_t{1} << 40);
  };
  // Few sizes: a state that comes back is often the same.
  auto bytes = [] {
    return *rc::gen::element<std::uint64_t>(0, 1, 4096, 30'000, 100'000);
  };
  switch (*rc::gen::weightedElement<int>({{4, 0},
                                          {10, 1},
                                          {3, 2},
                                          {5, 3},
                                          {2, 4},
                                          {2, 5},
                                          {1, 6},
                                          {1, 7},
                                          {1, 8},
                                          {1, 9},
                                          {2, 10},
                                          {1, 11},
                                          {2, 12},
                                          {1, 13},
                                          {1, 14}})) {
    case 0:
      return driver.define(unit(), bytes());
    case 1:
      return driver.put(unit(), seed());
    case 2:
      return driver.get(unit());
    case 3:
      return driver.commit();
    case 4:
      return driver.keep(name());
    case 5:
      return driver.drop(name());
    case 6:
      return driver.rollback();
    case 7:
      return driver.load(*rc::gen::inRange<std::size_t>(0, 10));
    case 8:
      return driver.begin_step();
    case 9:
      return driver.set_extra(*rc::gen::inRange<std::uint64_t>(0, 6000));
    case 10:
      disk.cut_power_after(*rc::gen::inRange<std::uint64_t>(0, 40));
      // Faults of a real file are chosen when it is opened.
      return reopen_to_cut ? driver.crash(seed()) : "";
    case 12:
      return driver.remove(unit());
    case 13:
      return driver.discard(unit());
    case 14:
      return driver.reserve(*rc::gen::inRange<std::uint64_t>(0, 800 * kKiB),
                            *rc::gen::inRange<std::size_t>(0, 10));
    default:
      return driver.crash(seed());
  }
}

void check_history(StoreDriver& driver, CrashableDisk& disk, int steps,
                   bool reopen_to_cut, const std::function<void()>& tidy) {
  RC_ASSERT(driver.broken() == "");
  for (int i = 0; i < 3; ++i) {
    RC_ASSERT(driver.define("u" + std::to_string(i),
                            *rc::gen::inRange<std::uint64_t>(0, 100'000)) ==
              "");
  }
  for (int i = 0; i < steps; ++i) {
    RC_ASSERT(random_step(driver, disk, reopen_to_cut) == "");
    if (driver.failed()) {
      RC_ASSERT(driver.crash(*rc::gen::arbitrary<std::uint64_t>()) == "");
      tidy();
    }
  }
  RC_ASSERT(driver.crash(*rc::gen::arbitrary<std::uint64_t>()) == "");
  tidy();
}

class Quiet {
 public:
  Quiet() { set_log_level(LogLevel::kOff); }
  ~Quiet() { set_log_level(before_); }

 private:
  LogLevel before_ = log_level();
};

TEST(StoreModel, RandomHistoriesWithPowerLossesMatchTheModel) {
  Quiet quiet;
  EXPECT_TRUE(rc::check([] {
    auto every = *rc::gen::inRange<std::uint64_t>(0, 3);
    auto kept = *rc::gen::inRange(0, 3);
    auto block = std::size_t{4096} << *rc::gen::inRange(0, 4);
    auto weights = *rc::gen::resize(
        3, rc::gen::nonEmpty(rc::gen::container<std::vector<double>>(
               rc::gen::element(1.0, 2.0, 5.0))));
    MemoryCrashDisk disk(weights);
    StoreDriver driver(disk, every, kept, block);
    check_history(driver, disk, 60, false, [] {});
  }));
}

TEST(StoreModel, RandomHistoriesWithKillsMatchTheModelOnRealFiles) {
  Quiet quiet;
  EXPECT_TRUE(rc::check([] {
    auto every = *rc::gen::inRange<std::uint64_t>(0, 3);
    auto kept = *rc::gen::inRange(0, 3);
    auto num_paths = *rc::gen::inRange<std::size_t>(1, 3);
    FileCrashDisk disk(num_paths);
    StoreDriver driver(disk, every, kept, 8192);
    check_history(driver, disk, 20, true, [&] { disk.forget_old(); });
  }));
}

// A fixed history that commits, keeps, drops, forgets and goes back; states
// come and go, and the store grows.
std::string history(StoreDriver& driver) {
  std::vector<std::function<std::string()>> steps = {
      [&] { return driver.define("a", 30'000); },
      [&] { return driver.define("b", 9'000); },
      [&] { return driver.put("a", 1); },
      [&] { return driver.commit(); },
      [&] { return driver.put("b", 2); },
      [&] { return driver.set_extra(100); },
      [&] { return driver.commit(); },
      [&] { return driver.keep("k"); },
      [&] { return driver.remove("b"); },
      [&] { return driver.reserve(900 * kKiB, 20); },
      [&] { return driver.define("d", 500'000); },
      [&] { return driver.put("d", 8); },
      [&] { return driver.commit(); },
      [&] { return driver.remove("d"); },
      [&] { return driver.define("b", 9'000); },
      [&] { return driver.put("a", 3); },
      [&] { return driver.put("b", 4); },
      [&] { return driver.commit(); },
      [&] { return driver.put("a", 5); },
      [&] { return driver.rollback(); },
      [&] { return driver.put("b", 6); },
      [&] { return driver.commit(); },
      [&] { return driver.reserve(950 * kKiB, 500); },
      [&] { return driver.discard("a"); },
      [&] { return driver.drop("k"); },
      [&] { return driver.keep("l"); },
      [&] { return driver.put("a", 7); },
      [&] { return driver.commit(); },
  };
  for (auto& step : steps) {
    std::string wrong = step();
    if (!wrong.empty() || driver.failed()) return wrong;
  }
  return "";
}

TEST(StoreModel, APowerLossAtEveryOperationLeavesACommittedVersion) {
  Quiet quiet;
  for (std::uint64_t every : {0, 1}) {
    std::uint64_t total = 0;
    {
      MemoryCrashDisk disk({1});
      StoreDriver driver(disk, every, 1, 8192);
      std::uint64_t begin = disk.disk().operations();
      ASSERT_EQ(history(driver), "");
      total = disk.disk().operations() - begin;
    }
    ASSERT_GT(total, 40u);
    for (std::uint64_t cut = 0; cut <= total; ++cut) {
      for (std::uint64_t seed = 0; seed < 3; ++seed) {
        MemoryCrashDisk disk({1});
        StoreDriver driver(disk, every, 1, 8192);
        disk.cut_power_after(cut);
        ASSERT_EQ(history(driver), "") << "cut after " << cut;
        ASSERT_EQ(driver.failed(), cut < total);
        ASSERT_EQ(driver.crash(seed), "")
            << "cut after " << cut << ", seed " << seed;
        // And it goes on from there.
        ASSERT_EQ(driver.define("c", 5'000), "");
        ASSERT_EQ(driver.put("c", 9), "");
        ASSERT_EQ(driver.commit(), "");
        ASSERT_EQ(driver.crash(seed), "");
      }
    }
  }
}

// The crashes above must be able to hurt: a commit that forgot to sync its data
// would be seen.
TEST(StoreModel, UnsyncedWritesAreLostInACrash) {
  auto disk = std::make_shared<io::MemoryDisk>();
  auto io = io::Io::create({.backend = io::Backend::kMemory, .disk = disk});
  auto file = (*io)->open("f", {.mode = io::Open::kCreate, .bytes = 64 * kKiB});
  Buffer data(64 * kKiB, 1);
  ASSERT_TRUE((*io)->write(*file, 0, data.span()).wait().ok());
  EXPECT_EQ(disk->unsynced_writes(), 1u);
  int whole = 0;
  int none = 0;
  int torn = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    auto io2 = io::Io::create(
        {.backend = io::Backend::kMemory, .disk = disk->after_crash(seed)});
    auto file2 = (*io2)->open("f", {});
    Buffer got(64 * kKiB, 2);
    ASSERT_TRUE((*io2)->read(*file2, 0, got.span()).wait().ok());
    bool zero = std::all_of(got.span().begin(), got.span().end(),
                            [](std::byte b) { return b == std::byte{0}; });
    ++(got == data ? whole : zero ? none : torn);
  }
  EXPECT_GT(whole, 10);
  EXPECT_GT(none, 10);
  EXPECT_GT(torn, 10);
  ASSERT_TRUE((*io)->sync(*file).wait().ok());
  EXPECT_EQ(disk->unsynced_writes(), 0u);
}

TEST(StoreModel, AnUnsyncedSizeMayBeLostInACrash) {
  auto disk = std::make_shared<io::MemoryDisk>();
  auto io = io::Io::create({.backend = io::Backend::kMemory, .disk = disk});
  auto file = (*io)->open("f", {.mode = io::Open::kCreate, .bytes = 64 * kKiB});
  ASSERT_TRUE((*io)->resize(*file, 128 * kKiB).ok());
  Buffer data(64 * kKiB, 1);
  ASSERT_TRUE((*io)->write(*file, 64 * kKiB, data.span()).wait().ok());
  auto size_after = [&](std::uint64_t seed) {
    auto io2 = io::Io::create(
        {.backend = io::Backend::kMemory, .disk = disk->after_crash(seed)});
    return (*io2)->open("f", {})->bytes();
  };
  int lost = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    lost += size_after(seed) == 64 * kKiB ? 1 : 0;
  }
  EXPECT_GT(lost, 10);
  EXPECT_LT(lost, 90);
  ASSERT_TRUE((*io)->sync(*file).wait().ok());
  EXPECT_EQ(size_after(1), 128 * kKiB);
}

}  // namespace
}  // namespace zinf
