#include "zinf/fault_injector.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "src/base/align.h"
#include "tests/support/buffer.h"
#include "tests/support/temp_dir.h"

namespace zinf::io {
namespace {

struct Installed {
  Installed() : injector(FaultInjector::install()) {}
  ~Installed() { FaultInjector::remove(); }
  std::shared_ptr<FaultInjector> injector;
};

TEST(FaultInjector, CountsOverAllIosAndFailsTheOneThatIsNamed) {
  TempDir dir;
  Installed faults;
  auto one = Io::create({}).value();
  auto two = Io::create({.backend = Backend::kThreads}).value();
  OpenOptions create{.mode = Open::kCreate, .bytes = kMiB};
  File a = one->open(dir.file("a"), create).value();
  File b = two->open(dir.file("b"), create).value();
  EXPECT_EQ(faults.injector->count(Operation::kCreate), 2u);
  Buffer data(kPage, 1);
  faults.injector->set({.on = Operation::kWrite, .nth = 2});
  EXPECT_TRUE(one->write(a, 0, data.span()).wait().ok());
  EXPECT_FALSE(faults.injector->fired());
  EXPECT_EQ(two->write(b, 0, data.span()).wait().errnum(), EIO);
  EXPECT_TRUE(faults.injector->fired());
  EXPECT_TRUE(two->write(b, 0, data.span()).wait().ok());
  faults.injector->clear();
  EXPECT_TRUE(faults.injector->fired());
  EXPECT_EQ(faults.injector->count(Operation::kWrite), 0u);
}

TEST(FaultInjector, ANewFileThatFailsIsNotThere) {
  TempDir dir;
  Installed faults;
  auto io = Io::create({}).value();
  faults.injector->set({.on = Operation::kCreate,
                        .errnum = ENOSPC,
                        .nth = 1,
                        .and_after = true});
  OpenOptions create{.mode = Open::kCreate, .bytes = kMiB};
  for (int i = 0; i < 2; ++i) {
    Status status = io->open(dir.file("a"), create).status();
    EXPECT_EQ(status.code(), Code::kNoSpace) << status.text();
    EXPECT_EQ(io->open(dir.file("a"), {}).status().errnum(), ENOENT);
  }
}

TEST(FaultInjector, IosThatWereMadeWithoutOneDoNotMeetIt) {
  TempDir dir;
  auto io = Io::create({}).value();
  Installed faults;
  faults.injector->set({.on = Operation::kCreate, .nth = 1, .and_after = true});
  EXPECT_TRUE(
      io->open(dir.file("a"), {.mode = Open::kCreate, .bytes = kMiB}).ok());
  EXPECT_EQ(faults.injector->count(Operation::kCreate), 0u);
}

}  // namespace
}  // namespace zinf::io
