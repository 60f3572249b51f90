// Directories that other users have prepared, that another process uses, or
// that a killed one has left.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "src/io/scratch.h"
#include "src/tier/new_directory.h"
#include "tests/support/child.h"
#include "tests/support/store_fixture.h"

namespace zinf {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kNobody = 65534;
constexpr const char* kText = "precious text of someone";

class HostileDirectory : public StoreTest {
 protected:
  HostileDirectory() { write(victim(), kText); }

  std::string victim() const { return dir_.file("victim"); }
  std::string run() const { return dir_.file("run"); }

  static void write(const std::string& path, const std::string& text) {
    std::ofstream(path) << text;
  }
  static std::string text_of(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  void make_store() {
    auto store = made(Store::create(on_disk()));
    StateId id = define(*store, "a", 1000);
    ASSERT_TRUE(put(*store, id, 1000, 1).ok());
    ASSERT_TRUE(store->commit(1).ok());
  }

  Code open_as(Access access) {
    StoreOptions options = on_disk();
    options.access = access;
    return Store::open(options).status().code();
  }

  std::vector<std::string> found() {
    std::vector<std::string> names;
    for (const FoundStore& one : find_stores(dir_.path())) {
      EXPECT_TRUE(one.leftover) << one.path;
      names.push_back(fs::relative(one.path, dir_.path()).string());
    }
    return names;
  }
};

TEST_F(HostileDirectory, ALockThatIsNoLockFileIsRefusedAndNothingIsWritten) {
  for (const char* kind : {"link", "hard link", "pipe", "dangling"}) {
    SCOPED_TRACE(kind);
    fs::remove_all(run());
    make_store();
    std::string lock = run() + "/lock";
    fs::remove(lock);
    if (std::string(kind) == "link") {
      fs::create_symlink(victim(), lock);
    } else if (std::string(kind) == "hard link") {
      fs::create_hard_link(victim(), lock);
    } else if (std::string(kind) == "pipe") {
      ASSERT_EQ(mkfifo(lock.c_str(), 0600), 0);
    } else {
      fs::create_symlink(dir_.file("none"), lock);
    }
    EXPECT_EQ(open_as(Access::kWrite), Code::kPermission);
    EXPECT_EQ(open_as(Access::kShared), Code::kPermission);
    EXPECT_EQ(open_as(Access::kRead), Code::kOk);
    EXPECT_EQ(Store::create(on_disk()).status().code(), Code::kPermission);
    std::vector<FoundStore> stores = find_stores(dir_.path());
    ASSERT_EQ(stores.size(), 1u);
    EXPECT_EQ(stores[0].owner, -1);
    EXPECT_EQ(remove_store(stores[0]).code(), Code::kPermission);
    EXPECT_EQ(text_of(victim()), kText);
    EXPECT_FALSE(fs::exists(dir_.file("none")));
  }
}

TEST_F(HostileDirectory, ARunDirectoryIsNotALinkButASaveMayBeReadThroughOne) {
  make_store();
  fs::rename(run(), dir_.file("elsewhere"));
  fs::create_directory_symlink(dir_.file("elsewhere"), run());
  EXPECT_EQ(open_as(Access::kWrite), Code::kPermission);
  EXPECT_EQ(open_as(Access::kShared), Code::kOk);
  EXPECT_EQ(open_as(Access::kRead), Code::kOk);
  EXPECT_EQ(Store::create(on_disk()).status().code(), Code::kPermission);
  EXPECT_EQ(remove_store({.path = run()}).code(), Code::kPermission);
  EXPECT_TRUE(fs::exists(dir_.file("elsewhere/volume.zinf")));

  fs::remove_all(dir_.file("elsewhere"));
  fs::create_directory(dir_.file("elsewhere"));
  EXPECT_EQ(Store::create(on_disk()).status().code(), Code::kPermission);
  EXPECT_TRUE(fs::is_empty(dir_.file("elsewhere")));
}

TEST_F(HostileDirectory, AVolumeThatIsALinkIsNotWritten) {
  make_store();
  fs::rename(run() + "/volume.zinf", dir_.file("volume"));
  std::string before = text_of(dir_.file("volume"));
  fs::create_symlink(dir_.file("volume"), run() + "/volume.zinf");
  EXPECT_NE(open_as(Access::kWrite), Code::kOk);
  EXPECT_EQ(Store::create(on_disk()).status().code(), Code::kInvalid);
  EXPECT_TRUE(find_stores(dir_.path()).empty());
  EXPECT_EQ(text_of(dir_.file("volume")), before);
}

TEST_F(HostileDirectory, ADirectoryThatOthersCanWriteIsRefused) {
  for (mode_t mode : {0770, 0707, 01777}) {
    fs::remove_all(run());
    ASSERT_EQ(mkdir(run().c_str(), 0700), 0);
    ASSERT_EQ(chmod(run().c_str(), mode), 0);
    Status status = Store::create(on_disk()).status();
    EXPECT_EQ(status.code(), Code::kPermission) << status.text();
    EXPECT_TRUE(fs::is_empty(run()));
  }
  ASSERT_EQ(chmod(run().c_str(), 0755), 0);
  EXPECT_TRUE(Store::create(on_disk()).ok());
}

TEST_F(HostileDirectory, ADirectoryOfAnotherUserIsNotUsedNorRemoved) {
  if (geteuid() != 0) GTEST_SKIP() << "needs rights";
  ASSERT_EQ(mkdir(run().c_str(), 0700), 0);
  ASSERT_EQ(chown(run().c_str(), kNobody, kNobody), 0);
  Status status = Store::create(on_disk()).status();
  EXPECT_EQ(status.code(), Code::kPermission);
  EXPECT_NE(status.text().find("belongs to user 65534"), std::string::npos);
  EXPECT_TRUE(fs::is_empty(run()));

  // And as that other user, of one that root has made.
  fs::remove_all(run());
  make_store();
  ASSERT_EQ(chmod(dir_.path().c_str(), 0777), 0);
  ASSERT_EQ(chmod(run().c_str(), 0755), 0);
  ASSERT_EQ(chmod((run() + "/volume.zinf").c_str(), 0644), 0);
  ZINF_EXPECT_CHILD_OK([&]() -> std::string {
    if (setgid(kNobody) != 0 || setuid(kNobody) != 0) return "skip";
    if (open_as(Access::kWrite) != Code::kPermission) return "written";
    if (open_as(Access::kRead) != Code::kOk) return "not read";
    if (remove_store({.path = run()}).code() != Code::kPermission) {
      return "removed";
    }
    return "";
  });
  EXPECT_TRUE(fs::exists(run() + "/volume.zinf"));
}

TEST_F(HostileDirectory, AFolderWhoseLockNoProcessHoldsIsTakenOver) {
  ASSERT_EQ(mkdir(run().c_str(), 0700), 0);
  write(run() + "/lock", std::to_string(getpid()) + "\n");
  auto store = made(Store::create(on_disk()));
  ASSERT_NE(store, nullptr);
  EXPECT_EQ(find_stores(dir_.path()).at(0).owner, getpid());
}

TEST_F(HostileDirectory, WhatHasBeenReplacedIsNotRemoved) {
  make_store();
  FoundStore before = find_stores(dir_.path()).at(0);
  fs::rename(run(), dir_.file("moved"));
  make_store();
  EXPECT_EQ(remove_store(before).code(), Code::kPermission);
  EXPECT_TRUE(fs::exists(run() + "/volume.zinf"));
}

TEST_F(HostileDirectory, WhatWasKilledDuringItsCreationIsFoundAndNothingElse) {
  std::vector<std::string> left = {"a.unfinished-0123456789abcdef",
                                   "b.unfinished",
                                   "c.unfinished-4711",
                                   "zinf-4711-0",
                                   "zinf-4711-1",
                                   "zinf-4711-2"};
  for (const std::string& name : left) fs::create_directory(dir_.file(name));
  fs::create_directories(
      dir_.file("b.unfinished/rank-00000-of-00002/"
                "rank-00000-of-00002.unfinished-ab"));
  write(dir_.file("a.unfinished-0123456789abcdef/volume.zinf"), "half");
  write(dir_.file("zinf-4711-1/lock"), "4711\n");
  write(dir_.file("zinf-4711-2/volume.zinf"), std::string(20000, '\0'));
  left.insert(left.end(), {"zinf-scratch-0123456789abcdef",
                           "zinf.unfinished-0123456789abcdef"});
  write(dir_.file(left[6]), "x");
  write(dir_.file(left[7]), "x");
  std::sort(left.begin(), left.end());

  fs::create_directory(dir_.file("essay.unfinished"));
  write(dir_.file("other.unfinished"), "x");
  fs::create_directory(dir_.file("mine.unfinished-12"));
  write(dir_.file("mine.unfinished-12/text"), "x");
  fs::create_directory_symlink(dir_.file(left[0]),
                               dir_.file("link.unfinished-12"));
  fs::create_symlink(victim(), dir_.file("zinf-scratch-12"));

  EXPECT_EQ(found(), left);
  for (const FoundStore& one : find_stores(dir_.path())) {
    EXPECT_EQ(one.owner, 0) << one.path;
    Status status = remove_store(one);
    EXPECT_TRUE(status.ok()) << status.text();
    EXPECT_FALSE(fs::exists(one.path)) << one.path;
  }
  for (const char* name : {"essay.unfinished", "other.unfinished",
                           "mine.unfinished-12/text", "victim"}) {
    EXPECT_TRUE(fs::exists(dir_.file(name))) << name;
  }
}

TEST_F(HostileDirectory, ASaveInTheMakingIsNotRemoved) {
  auto directory = tier::NewDirectory::make(dir_.file("save"));
  ASSERT_TRUE(directory.ok());
  std::vector<FoundStore> stores = find_stores(dir_.path());
  ASSERT_EQ(stores.size(), 1u);
  EXPECT_EQ(stores[0].path, directory->path());
  EXPECT_EQ(stores[0].owner, -1);
  EXPECT_EQ(remove_store(stores[0]).code(), Code::kPermission);
  EXPECT_TRUE(fs::exists(directory->path()));
  ASSERT_TRUE(directory->publish().ok());
  EXPECT_TRUE(fs::is_directory(dir_.file("save")));
}

TEST_F(HostileDirectory, AFileWithoutANameLeavesNoneAndIsLinkedWhole) {
  StoreOptions options = on_disk();
  options.paths = {{.path = dir_.path()}};
  options.files = Files::kUnlinked;
  auto store = made(Store::create(options));
  StateId id = define(*store, "a", 1000);
  ASSERT_TRUE(put(*store, id, 1000, 1).ok());
  ASSERT_TRUE(store->commit(1).ok());
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_.path()), {}),
            1);  // the victim

  EXPECT_EQ(store->link(victim()).code(), Code::kInvalid);
  fs::create_symlink(dir_.file("none"), dir_.file("dangling"));
  EXPECT_EQ(store->link(dir_.file("dangling")).code(), Code::kInvalid);
  EXPECT_EQ(text_of(victim()), kText);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_.path()), {}), 2);
  ASSERT_TRUE(store->link(dir_.file("run")).ok());
  store.reset();
  EXPECT_EQ(fs::status(run()).permissions(), fs::perms::owner_all);
  store = made(Store::open(on_disk()));
  id = store->find("a", "exp_avg").value();
  EXPECT_TRUE(holds(*store, id, 1000, 1));
}

TEST_F(HostileDirectory, ScratchHasNoName) {
  StoreOptions options = on_disk();
  options.paths = {{.path = dir_.path()}};
  options.files = Files::kScratch;
  auto store = made(Store::create(options));
  StateId id = define(*store, "a", 1000);
  ASSERT_TRUE(put(*store, id, 1000, 1).ok());
  ASSERT_TRUE(store->reserve(8 * kMiB, 16).ok());
  EXPECT_TRUE(holds(*store, id, 1000, 1));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_.path()), {}), 1);
  EXPECT_EQ(store->link(run()).code(), Code::kInvalid);
}

}  // namespace
}  // namespace zinf
