// What every I/O back end must do, run on each of them: io_uring, threads and
// memory, direct and buffered.
#include "zinf/io.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <thread>

#include "src/base/align.h"
#include "tests/support/buffer.h"
#include "tests/support/temp_dir.h"
#include "zinf/disk.h"

namespace zinf::io {
namespace {

struct Case {
  Backend backend;
  Caching caching;
  const char* name;
};

void PrintTo(const Case& which, std::ostream* out) { *out << which.name; }

class IoConformance : public testing::TestWithParam<Case> {
 protected:
  Options options() const {
    return {.backend = GetParam().backend,
            .caching = GetParam().caching,
            .block_bytes = 64 * kKiB,
            .depth = 4,
            .threads = 3};
  }

  void SetUp() override {
    Status uring = probe_uring();
    if (GetParam().backend == Backend::kUring && !uring.ok()) {
      GTEST_SKIP() << uring.text();
    }
  }

  std::unique_ptr<Io> make(const Options& options) {
    Result<std::unique_ptr<Io>> io = Io::create(options);
    EXPECT_TRUE(io.ok()) << io.status().text();
    return std::move(io).value();
  }
  std::unique_ptr<Io> make() { return make(options()); }
  std::unique_ptr<Io> make(std::vector<Fault> faults) {
    Options with = options();
    with.faults = std::move(faults);
    return make(with);
  }

  File create(Io& io, std::uint64_t bytes, const std::string& name = "data") {
    Result<File> file =
        io.open(dir_.file(name), {.mode = Open::kCreate, .bytes = bytes});
    EXPECT_TRUE(file.ok()) << file.status().text();
    return std::move(file).value();
  }

  TempDir dir_;
};

TEST_P(IoConformance, ReadsBackWhatWasWritten) {
  auto io = make();
  File file = create(*io, kMiB);
  Buffer out(kMiB, 1);
  Buffer in(kMiB, 2);
  ASSERT_TRUE(io->write(file, 0, out.span()).wait().ok());
  ASSERT_TRUE(io->sync(file).wait().ok());
  ASSERT_TRUE(io->read(file, 0, in.span()).wait().ok());
  EXPECT_TRUE(in == out);
  Stats stats = io->stats();
  EXPECT_EQ(stats.bytes_read, kMiB);
  EXPECT_EQ(stats.bytes_written, kMiB);
  EXPECT_EQ(stats.buffered_blocks, file.direct() ? 0u : stats.blocks - 1);
}

TEST_P(IoConformance, ANewFileHasItsSizeAndPrivateMode) {
  if (GetParam().backend == Backend::kMemory) GTEST_SKIP() << "no real file";
  auto io = make();
  File file = create(*io, 3 * kMiB);
  EXPECT_EQ(file.bytes(), 3 * kMiB);
  EXPECT_EQ(std::filesystem::file_size(file.path()), 3 * kMiB);
  auto mode = std::filesystem::status(file.path()).permissions();
  EXPECT_EQ(mode, std::filesystem::perms::owner_read |
                      std::filesystem::perms::owner_write);
}

TEST_P(IoConformance, SyncCoversWritesThatAreStillPending) {
  auto io = make();
  File file = create(*io, 4 * kMiB);
  Buffer out(4 * kMiB, 1);
  Request write = io->write(file, 0, out.span());
  Request sync = io->sync(file);
  ASSERT_TRUE(sync.wait().ok());
  EXPECT_TRUE(write.done());
  EXPECT_TRUE(write.wait().ok());
}

TEST_P(IoConformance, ReopenedFilesKeepTheirContent) {
  auto io = make();
  Buffer out(kMiB, 1);
  {
    File file = create(*io, kMiB);
    ASSERT_TRUE(io->write(file, 0, out.span()).wait().ok());
  }
  Result<File> again = io->open(dir_.file("data"), {});
  ASSERT_TRUE(again.ok()) << again.status().text();
  EXPECT_EQ(again->bytes(), kMiB);
  Buffer in(kMiB, 2);
  ASSERT_TRUE(io->read(*again, 0, in.span()).wait().ok());
  EXPECT_TRUE(in == out);
  Result<File> replaced =
      io->open(dir_.file("data"), {.mode = Open::kReplace, .bytes = 64 * kKiB});
  ASSERT_TRUE(replaced.ok()) << replaced.status().text();
  EXPECT_EQ(replaced->bytes(), 64 * kKiB);
}

TEST_P(IoConformance, CreateRefusesAnExistingFileAndOpenAMissingOne) {
  auto io = make();
  File file = create(*io, kMiB);
  Result<File> second =
      io->open(dir_.file("data"), {.mode = Open::kCreate, .bytes = kMiB});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().errnum(), EEXIST);
  Result<File> missing = io->open(dir_.file("missing"), {});
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), Code::kNotFound);
  EXPECT_NE(missing.status().text().find("missing"), std::string::npos);
  EXPECT_FALSE(io->remove(dir_.file("missing")).ok());
  EXPECT_TRUE(io->remove(dir_.file("data")).ok());
}

TEST_P(IoConformance, RefusesEmptyAndOutlyingTransfers) {
  auto io = make();
  File file = create(*io, kMiB);
  Buffer data(kMiB, 1);
  EXPECT_EQ(io->read(file, 0, {}).wait().code(), Code::kInvalid);
  Status beyond = io->write(file, 4096, data.span()).wait();
  EXPECT_EQ(beyond.code(), Code::kInvalid);
  EXPECT_NE(beyond.text().find("beyond the file's 1048576"), std::string::npos);
  std::uint64_t huge = ~std::uint64_t{0} - 4095;
  EXPECT_EQ(io->read(file, huge, data.span()).wait().code(), Code::kInvalid);
  EXPECT_EQ(io->read(File(), 0, data.span()).wait().code(), Code::kInvalid);
  Result<File> empty =
      io->open(dir_.file("empty"), {.mode = Open::kCreate, .bytes = 0});
  EXPECT_EQ(empty.status().code(), Code::kInvalid);
  EXPECT_FALSE(std::filesystem::exists(dir_.file("empty")));
}

TEST_P(IoConformance, AFileGrowsAndShrinksWithTransfersInFlight) {
  auto io = make();
  File file = create(*io, kMiB);
  Buffer first(kMiB, 1);
  Buffer second(kMiB, 2);
  Request write = io->write(file, 0, first.span());
  ASSERT_TRUE(io->resize(file, 2 * kMiB).ok());
  EXPECT_EQ(file.bytes(), 2 * kMiB);
  EXPECT_TRUE(io->write(file, kMiB, second.span()).wait().ok());
  EXPECT_TRUE(write.wait().ok());
  EXPECT_TRUE(io->sync(file).wait().ok());
  Buffer got(kMiB, 3);
  ASSERT_TRUE(io->read(file, 0, got.span()).wait().ok());
  EXPECT_TRUE(got == first);
  ASSERT_TRUE(io->read(file, kMiB, got.span()).wait().ok());
  EXPECT_TRUE(got == second);

  ASSERT_TRUE(io->resize(file, kMiB).ok());
  EXPECT_EQ(file.bytes(), kMiB);
  EXPECT_EQ(io->read(file, kMiB, got.span()).wait().code(), Code::kInvalid);
  ASSERT_TRUE(io->resize(file, 2 * kMiB).ok());
  ASSERT_TRUE(io->read(file, kMiB, got.span()).wait().ok());
  EXPECT_TRUE(std::all_of(got.span().begin(), got.span().end(),
                          [](std::byte b) { return b == std::byte{0}; }));
  EXPECT_EQ(io->resize(file, 0).errnum(), EINVAL);
  EXPECT_EQ(io->resize({}, 1).code(), Code::kInvalid);
}

TEST_P(IoConformance, AResizeThatFailsChangesNothing) {
  auto io = make({{.on = Operation::kResize, .errnum = ENOSPC, .nth = 1}});
  File file = create(*io, kMiB);
  Status full = io->resize(file, 2 * kMiB);
  EXPECT_EQ(full.code(), Code::kNoSpace);
  EXPECT_NE(full.text().find("data"), std::string::npos) << full.text();
  EXPECT_EQ(file.bytes(), kMiB);
  if (GetParam().backend != Backend::kMemory) {
    // More than any disk has: refused by the file system itself.
    Status beyond = io->resize(file, std::uint64_t{1} << 60);
    EXPECT_FALSE(beyond.ok());
    EXPECT_EQ(std::filesystem::file_size(dir_.file("data")), kMiB);
  }
  EXPECT_TRUE(io->resize(file, 2 * kMiB).ok());
}

TEST_P(IoConformance, ManyThreadsShareOneIo) {
  auto io = make();
  constexpr std::size_t kPart = 512 * kKiB;
  constexpr std::size_t kThreads = 4;
  File file = create(*io, kPart * kThreads);
  std::vector<std::thread> threads;
  std::vector<int> good(kThreads, 0);
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Buffer out(kPart);
      Buffer in(kPart);
      for (std::uint64_t round = 0; round < 5; ++round) {
        out.fill(t * 100 + round);
        if (!io->write(file, t * kPart, out.span()).wait().ok()) return;
        if (!io->read(file, t * kPart, in.span()).wait().ok()) return;
        if (in == out) ++good[t];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, std::vector<int>(kThreads, 5));
}

TEST_P(IoConformance, WhatSomebodyWaitsForGoesFirst) {
  constexpr std::size_t kBlock = 64 * kKiB;
  constexpr std::size_t kRequests = 20;
  Options one_by_one = options();
  one_by_one.depth = 1;
  one_by_one.faults = {{.kind = Fault::Kind::kRate, .bytes_per_second = 8e6}};
  auto io = make(one_by_one);
  File file = create(*io, kRequests * kBlock);
  Buffer memory(kRequests * kBlock);
  std::vector<Request> requests;
  for (std::size_t i = 0; i < kRequests; ++i) {
    requests.push_back(
        io->read(file, i * kBlock, memory.span().subspan(i * kBlock, kBlock)));
  }
  ASSERT_TRUE(requests.back().wait().ok());
  EXPECT_LT(std::ranges::count_if(requests, &Request::done), 10);
  ASSERT_TRUE(wait_all(requests).ok());
}

// 16 neighbours in a file, two blocks' worth, in another order and elsewhere in
// memory.
class Neighbours {
 public:
  static constexpr std::size_t kEach = 8 * kKiB;
  static constexpr std::size_t kCount = 16;
  static constexpr std::size_t kBytes = kEach * kCount;

  std::vector<Request> write(Io& io, const File& file) {
    return submit([&](std::size_t offset, std::span<std::byte> memory) {
      return io.write(file, offset, memory);
    });
  }
  std::vector<Request> read(Io& io, const File& file) {
    return submit([&](std::size_t offset, std::span<std::byte> memory) {
      return io.read(file, offset, memory);
    });
  }
  Buffer& memory() { return memory_; }

 private:
  template <typename Submit>
  std::vector<Request> submit(Submit submit) {
    std::vector<Request> requests;
    for (std::size_t i = 0; i < kCount; ++i) {
      std::size_t file_place = i * 5 % kCount;
      std::size_t memory_place = file_place * 3 % kCount;
      requests.push_back(
          submit(file_place * kEach,
                 memory_.span().subspan(memory_place * kEach, kEach)));
    }
    return requests;
  }
  Buffer memory_{kBytes, 1};
};

TEST_P(IoConformance, NeighboursBecomeOneTransfer) {
  auto io = make();
  File file = create(*io, Neighbours::kBytes);
  Neighbours there;
  std::vector<Request> requests;
  {
    Plug plug;
    requests = there.write(*io, file);
  }
  ASSERT_TRUE(wait_all(requests).ok());
  Stats written = io->stats();
  EXPECT_EQ(written.blocks, file.direct() ? 2u : Neighbours::kCount);
  EXPECT_EQ(written.joined, file.direct() ? Neighbours::kCount - 2 : 0u);
  EXPECT_EQ(written.bytes_written, Neighbours::kBytes);
  Neighbours back;
  back.memory().fill(2);
  {
    Plug plug;
    Plug inner;
    requests = back.read(*io, file);
    ASSERT_TRUE(requests[3].wait().ok()) << "a wait lets them go";
  }
  ASSERT_TRUE(wait_all(requests).ok());
  EXPECT_TRUE(back.memory() == there.memory());
  EXPECT_EQ(io->stats().buffered_blocks, file.direct() ? 0u : 2 * 16u);
}

TEST_P(IoConformance, NeighboursThatFailTogetherAreTriedOneByOne) {
  auto io =
      make({{.kind = Fault::Kind::kShort, .on = Operation::kWrite, .nth = 1},
            {.on = Operation::kWrite, .errnum = EINTR, .nth = 2},
            {.on = Operation::kRead, .errnum = EIO, .nth = 1},
            {.on = Operation::kRead, .errnum = EIO, .nth = 7}});
  File file = create(*io, Neighbours::kBytes);
  if (!file.direct()) GTEST_SKIP() << "nothing is joined in the page cache";
  Neighbours there;
  std::vector<Request> requests;
  {
    Plug plug;
    requests = there.write(*io, file);
  }
  ASSERT_TRUE(wait_all(requests).ok());
  Neighbours back;
  back.memory().fill(2);
  {
    Plug plug;
    requests = back.read(*io, file);
  }
  std::size_t failed = 0;
  for (Request& request : requests) {
    Status status = request.wait();
    if (status.ok()) continue;
    ++failed;
    EXPECT_NE(status.text().find("wanted 8192 bytes"), std::string::npos)
        << status.text();
  }
  EXPECT_EQ(failed, 1u) << "the one that failed by itself";
  requests = back.read(*io, file);
  ASSERT_TRUE(wait_all(requests).ok());
  EXPECT_TRUE(back.memory() == there.memory());
}

TEST_P(IoConformance, MorePiecesThanASystemCallTakesAreSeveralTransfers) {
  constexpr std::size_t kCount = 1100;
  Options with = options();
  with.block_bytes = 8 * kMiB;
  auto io = make(with);
  File file = create(*io, kCount * 4 * kKiB);
  Buffer there{kCount * 4 * kKiB, 1};
  std::vector<Request> requests;
  {
    Plug plug;
    for (std::size_t i = 0; i < kCount; ++i) {
      requests.push_back(io->write(
          file, i * 4 * kKiB, there.span().subspan(i * 4 * kKiB, 4 * kKiB)));
    }
  }
  ASSERT_TRUE(wait_all(requests).ok());
  EXPECT_EQ(io->stats().blocks, file.direct() ? 2u : kCount);
}

TEST_P(IoConformance, LargeRequestsAndOtherThreadsAreNotHeldBack) {
  auto io = make();
  File file = create(*io, 2 * kMiB);
  Buffer there{kMiB, 1};
  Plug plug;
  {
    Plug inner;
    Request large = io->write(file, 0, there.span());
    std::thread([&] {
      Request small = io->write(file, kMiB, there.span().first(4 * kKiB));
      while (!small.done()) std::this_thread::yield();
      EXPECT_TRUE(small.wait().ok());
    }).join();
    while (!large.done()) std::this_thread::yield();
    ASSERT_TRUE(large.wait().ok());
  }
  Request held = io->write(file, 0, there.span().first(4 * kKiB));
  EXPECT_EQ(io->stats().bytes_written, kMiB + 4 * kKiB)
      << "the end of an inner one lets nothing go";
  ASSERT_TRUE(held.wait().ok());
}

TEST_P(IoConformance, APlugHoldsNobodyUp) {
  auto io = make();
  File file = create(*io, Neighbours::kBytes);
  Neighbours there;
  {
    Plug plug;
    std::vector<Request> requests = there.write(*io, file);
    io->drain();
    EXPECT_TRUE(std::ranges::all_of(requests, &Request::done));
  }
  {
    Plug plug;
    std::vector<Request> requests = there.read(*io, file);
    std::thread([&] { EXPECT_TRUE(requests[3].wait().ok()); }).join();
    Neighbours again;
    std::vector<Request> writes = again.write(*io, file);
    std::thread([&] { EXPECT_TRUE(io->sync(file).wait().ok()); }).join();
    EXPECT_TRUE(std::ranges::all_of(writes, &Request::done))
        << "they came before the sync";
    ASSERT_TRUE(wait_all(requests).ok());
    ASSERT_TRUE(wait_all(writes).ok());
  }
  std::vector<Request> requests;
  {
    Plug plug;
    requests = there.read(*io, file);
    io->shutdown();
  }
  for (Request& request : requests) {
    EXPECT_EQ(request.wait().code(), Code::kCancelled);
  }
}

TEST_P(IoConformance, RegisteredMemoryMovesTheSameBytes) {
  auto io = make();
  File file = create(*io, kMiB);
  Buffer memory(2 * kMiB, 1);
  Registration registration = io->register_memory(memory.span());
  EXPECT_EQ(registration.active(), GetParam().backend == Backend::kUring);
  auto out = memory.span().first(kMiB);
  auto in = memory.span().last(kMiB);
  ASSERT_TRUE(io->write(file, 0, out).wait().ok());
  ASSERT_TRUE(io->read(file, 0, in).wait().ok());
  EXPECT_TRUE(std::equal(out.begin(), out.end(), in.begin()));
  registration.release();
  ASSERT_TRUE(io->read(file, 0, in).wait().ok());
}

TEST_P(IoConformance, ManyRegistrationsRunOutOfSlotsWithoutHarm) {
  auto io = make();
  File file = create(*io, 4096);
  Buffer memory(300 * 4096, 1);
  std::vector<Registration> all;
  for (std::size_t i = 0; i < 300; ++i) {
    all.push_back(io->register_memory(memory.span().subspan(i * 4096, 4096)));
  }
  auto last = memory.span().last(4096);
  EXPECT_TRUE(io->write(file, 0, last).wait().ok());
}

TEST_P(IoConformance, ARegistrationMayGoWhileItsRequestsRun) {
  auto io = make({{.kind = Fault::Kind::kShort,
                   .on = Operation::kWrite,
                   .probability = 0.5}});
  File file = create(*io, 4 * kMiB);
  Buffer memory(4 * kMiB, 1);
  // Often: a block must be between its preparation and the kernel.
  for (int i = 0; i < 100; ++i) {
    Registration registration = io->register_memory(memory.span());
    Request write = io->write(file, 0, memory.span());
    registration.release();
    Status status = write.wait();
    ASSERT_TRUE(status.ok()) << "round " << i << ": " << status.text();
  }
}

TEST_P(IoConformance, ReplaceRefusesWhatIsNoRegularFile) {
  if (GetParam().backend == Backend::kMemory) GTEST_SKIP() << "no real file";
  auto io = make();
  std::string link = dir_.file("device");
  std::filesystem::create_symlink("/dev/null", link);
  Result<File> file =
      io->open(link, {.mode = Open::kReplace, .bytes = 64 * kKiB});
  EXPECT_EQ(file.status().code(), Code::kInvalid) << file.status().text();
  EXPECT_TRUE(std::filesystem::exists(link));
}

TEST_P(IoConformance, ShutdownCancelsWhatIsQueuedAndLaterWork) {
  // Every write is slow, so that most of the big request is still queued.
  auto io = make({{.kind = Fault::Kind::kDelay,
                   .on = Operation::kWrite,
                   .probability = 1,
                   .delay = std::chrono::milliseconds(20)}});
  File file = create(*io, 4 * kMiB);
  Buffer data(4 * kMiB, 1);
  Request write = io->write(file, 0, data.span());
  Request sync = io->sync(file);
  io->shutdown();
  EXPECT_EQ(write.wait().code(), Code::kCancelled);
  EXPECT_EQ(sync.wait().code(), Code::kCancelled);
  EXPECT_EQ(io->read(file, 0, data.span()).wait().code(), Code::kCancelled);
  EXPECT_EQ(io->open(dir_.file("x"), {}).status().code(), Code::kCancelled);
  EXPECT_FALSE(io->register_memory(data.span()).active());
}

TEST_P(IoConformance, AnUnfinishedRequestIsWaitedForByItsDestructor) {
  auto io = make({{.kind = Fault::Kind::kDelay,
                   .on = Operation::kWrite,
                   .probability = 1,
                   .delay = std::chrono::milliseconds(5)}});
  File file = create(*io, kMiB);
  {
    Buffer data(kMiB, 1);
    Request forgotten = io->write(file, 0, data.span());
  }  // ASan would see a transfer from freed memory
  EXPECT_EQ(io->stats().bytes_written, kMiB);
}

TEST_P(IoConformance, DrainWaitsForEverybody) {
  auto io = make();
  File file = create(*io, 4 * kMiB);
  Buffer data(4 * kMiB, 1);
  std::vector<Request> requests;
  for (std::size_t i = 0; i < 4; ++i) {
    requests.push_back(
        io->write(file, i * kMiB, data.span().subspan(i * kMiB, kMiB)));
  }
  io->drain();
  for (Request& request : requests) EXPECT_TRUE(request.done());
  EXPECT_TRUE(wait_all(requests).ok());
}

TEST_P(IoConformance, FileOutlivesItsIoHarmlessly) {
  auto io = make();
  File file = create(*io, kMiB);
  Registration registration;
  Buffer memory(kMiB, 1);
  registration = io->register_memory(memory.span());
  io.reset();
  EXPECT_EQ(file.bytes(), kMiB);
}

// --- Faults -----------------------------------------------------------------

TEST_P(IoConformance, ShortTransfersAndRetriesAreInvisible) {
  auto io = make({{.kind = Fault::Kind::kShort,
                   .on = Operation::kWrite,
                   .probability = 0.3,
                   .seed = 7},
                  {.on = Operation::kWrite,
                   .errnum = EINTR,
                   .probability = 0.2,
                   .seed = 8},
                  {.on = Operation::kSync, .errnum = EINTR, .nth = 1},
                  {.kind = Fault::Kind::kShort,
                   .on = Operation::kRead,
                   .probability = 0.3,
                   .seed = 9},
                  {.on = Operation::kRead,
                   .errnum = EAGAIN,
                   .probability = 0.2,
                   .seed = 10}});
  File file = create(*io, 4 * kMiB);
  Buffer out(4 * kMiB, 1);
  Buffer in(4 * kMiB, 2);
  ASSERT_TRUE(io->write(file, 0, out.span()).wait().ok());
  ASSERT_TRUE(io->sync(file).wait().ok());
  ASSERT_TRUE(io->read(file, 0, in.span()).wait().ok());
  EXPECT_TRUE(in == out);
  EXPECT_GT(io->stats().continued, 0u);
  EXPECT_GT(io->stats().retried, 0u);
}

TEST_P(IoConformance, AnErrorNamesOperationPathOffsetAndCounts) {
  auto io = make({{.on = Operation::kRead, .errnum = EIO, .nth = 3}});
  File file = create(*io, kMiB);
  Buffer data(kMiB, 1);
  ASSERT_TRUE(io->write(file, 0, data.span()).wait().ok());
  Request read = io->read(file, 0, data.span());
  Status status = read.wait();
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_EQ(status.errnum(), EIO);
  EXPECT_EQ(status.text(), "read " + dir_.file("data") +
                               " at offset 131072: wanted 65536 bytes, got 0: "
                               "Input/output error (errno 5 EIO)");
  EXPECT_EQ(read.wait().text(), status.text());             // it sticks
  EXPECT_TRUE(io->read(file, 0, data.span()).wait().ok());  // to its request
}

TEST_P(IoConformance, AFullDiskIsSaidAndATornWriteIsAnError) {
  auto io =
      make({{.on = Operation::kWrite, .errnum = ENOSPC, .nth = 2},
            {.kind = Fault::Kind::kTorn, .on = Operation::kWrite, .nth = 20}});
  File file = create(*io, kMiB);
  Buffer data(kMiB, 1);
  Status full = io->write(file, 0, data.span()).wait();
  EXPECT_EQ(full.code(), Code::kNoSpace);
  Status torn;
  for (int i = 0; i < 3 && torn.ok(); ++i) {
    torn = io->write(file, 0, data.span()).wait();
  }
  EXPECT_EQ(torn.code(), Code::kIo);
}

TEST_P(IoConformance, AFailedSyncIsAnError) {
  auto io = make({{.on = Operation::kSync, .errnum = EIO, .nth = 1}});
  File file = create(*io, kMiB);
  Status status = io->sync(file).wait();
  EXPECT_EQ(status.errnum(), EIO);
  EXPECT_NE(status.text().find("sync " + dir_.file("data")), std::string::npos);
}

TEST_P(IoConformance, EndlessEagainBecomesAnError) {
  auto io =
      make({{.on = Operation::kRead, .errnum = EAGAIN, .probability = 1}});
  File file = create(*io, kMiB);
  Buffer data(64 * kKiB, 1);
  EXPECT_EQ(io->read(file, 0, data.span()).wait().errnum(), EAGAIN);
}

TEST_P(IoConformance, AFileTruncatedUnderneathIsAShortRead) {
  if (GetParam().backend == Backend::kMemory) GTEST_SKIP() << "no real file";
  auto io = make();
  File file = create(*io, kMiB);
  std::filesystem::resize_file(file.path(), 100 * kKiB);
  Buffer data(kMiB, 1);
  Status status = io->read(file, 0, data.span()).wait();
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_NE(status.text().find("end of file"), std::string::npos)
      << status.text();
}

TEST_P(IoConformance, AnErrorNobodyAskedForIsLogged) {
  auto io = make({{.on = Operation::kWrite, .errnum = EIO, .nth = 1}});
  File file = create(*io, kMiB);
  Buffer data(kMiB, 1);
  testing::internal::CaptureStderr();
  {
    Request forgotten = io->write(file, 0, data.span());
  }
  EXPECT_NE(testing::internal::GetCapturedStderr().find("nobody asked"),
            std::string::npos);
}

// --- Random histories against a model ---------------------------------------

struct Step {
  std::uint64_t offset;
  std::size_t bytes;
  std::size_t odd;  // misalignment of the memory
  bool write;
};

// Disjoint ranges may be in flight together; the model is a plain array.
void check_history(Io& io, File& file, std::size_t size) {
  std::vector<std::byte> model(size, std::byte{0});
  auto rounds = *rc::gen::inRange(1, 6);
  for (int round = 0; round < rounds; ++round) {
    auto parts = static_cast<std::size_t>(*rc::gen::inRange(1, 7));
    std::size_t width = size / parts;
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<Step> steps;
    std::vector<Request> requests;
    std::optional<Plug> plug;
    if (*rc::gen::arbitrary<bool>()) plug.emplace();
    for (std::size_t part = 0; part < parts; ++part) {
      bool odd = *rc::gen::inRange(0, 3) == 0;
      bool whole = *rc::gen::arbitrary<bool>();  // a neighbour of others
      std::size_t grain = odd ? 1 : 4096;
      std::size_t begin = align_up(part * width, std::size_t{4096});
      std::size_t end = align_down((part + 1) * width, std::size_t{4096});
      auto grains = static_cast<int>((end - begin) / grain);
      auto first = static_cast<std::size_t>(*rc::gen::inRange(0, grains));
      auto count = static_cast<std::size_t>(
          *rc::gen::inRange(1, grains - static_cast<int>(first) + 1));
      if (whole) {
        first = 0;
        count = static_cast<std::size_t>(grains);
      }
      Step step{begin + first * grain, count * grain,
                odd ? static_cast<std::size_t>(*rc::gen::inRange(0, 100)) : 0,
                *rc::gen::arbitrary<bool>()};
      buffers.push_back(std::make_unique<Buffer>(
          step.bytes + step.odd, *rc::gen::arbitrary<std::uint64_t>()));
      auto memory = buffers.back()->span().subspan(step.odd);
      requests.push_back(step.write ? io.write(file, step.offset, memory)
                                    : io.read(file, step.offset, memory));
      steps.push_back(step);
    }
    for (Request& request : requests) {
      Status status = request.wait();
      RC_ASSERT(status.text() == "ok");
    }
    for (std::size_t i = 0; i < parts; ++i) {
      auto memory = buffers[i]->span().subspan(steps[i].odd);
      auto place = model.begin() + static_cast<std::ptrdiff_t>(steps[i].offset);
      if (steps[i].write) {
        std::copy(memory.begin(), memory.end(), place);
      } else {
        RC_ASSERT(std::equal(memory.begin(), memory.end(), place));
      }
    }
  }
  Buffer all(size);
  RC_ASSERT(io.read(file, 0, all.span()).wait().ok());
  RC_ASSERT(std::equal(model.begin(), model.end(), all.data()));
}

TEST_P(IoConformance, RandomHistoriesMatchAModel) {
  constexpr std::size_t kSize = 600 * kKiB;
  EXPECT_TRUE(rc::check([&] {
    Options with = options();
    with.depth = *rc::gen::inRange(1, 9);
    with.block_bytes = 4096u * static_cast<unsigned>(*rc::gen::inRange(1, 40));
    if (*rc::gen::arbitrary<bool>()) {
      for (Operation on : {Operation::kRead, Operation::kWrite}) {
        with.faults.push_back({.kind = Fault::Kind::kShort,
                               .on = on,
                               .probability = 0.2,
                               .seed = *rc::gen::arbitrary<std::uint64_t>()});
        with.faults.push_back({.on = on,
                               .errnum = EINTR,
                               .probability = 0.1,
                               .seed = *rc::gen::arbitrary<std::uint64_t>()});
        with.faults.push_back({.kind = Fault::Kind::kDelay,
                               .on = on,
                               .probability = 0.1,
                               .seed = *rc::gen::arbitrary<std::uint64_t>(),
                               .delay = std::chrono::microseconds(200)});
      }
    }
    auto io = make(with);
    Result<File> file =
        io->open(dir_.file("model"), {.mode = Open::kReplace, .bytes = kSize});
    RC_ASSERT(file.ok());
    check_history(*io, *file, kSize);
  }));
}

INSTANTIATE_TEST_SUITE_P(
    Backends, IoConformance,
    testing::Values(Case{Backend::kUring, Caching::kDirect, "UringDirect"},
                    Case{Backend::kUring, Caching::kBuffered, "UringBuffered"},
                    Case{Backend::kThreads, Caching::kDirect, "ThreadsDirect"},
                    Case{Backend::kThreads, Caching::kBuffered,
                         "ThreadsBuffered"},
                    Case{Backend::kMemory, Caching::kBuffered, "Memory"}),
    [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace zinf::io
