// kill -9 at random moments of a process that commits version after version,
// with states that come and go and a store that grows.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <random>
#include <thread>

#include "src/base/align.h"
#include "tests/support/buffer.h"
#include "tests/support/temp_dir.h"
#include "zinf/store.h"

namespace zinf {
namespace {

constexpr int kKills = 220;
constexpr std::array<std::uint64_t, 3> kSizes = {200'000, 4096, 77'777};

StoreOptions options_in(const TempDir& dir) {
  StoreOptions options;
  options.paths = {{.path = dir.file("a"), .weight = 2},
                   {.path = dir.file("b"), .weight = 1}};
  options.durability = Durability::every_step();
  options.verify = Verify::kAlways;
  options.state_bytes = 300'000;
  options.num_states = kSizes.size() + 1;
  options.block_bytes = 32 * kKiB;
  return options;
}

Result<StateId> define(Store& store, std::size_t i) {
  return store.define({.unit = "u" + std::to_string(i),
                       .state = "weight",
                       .dtype = "uint8",
                       .shape = {kSizes[i]},
                       .bytes = kSizes[i]});
}

std::uint64_t seed_of(std::uint64_t step, std::size_t i) {
  return step * 1000 + i;
}

// A state of this step alone.
Status put_passing(Store& store, std::uint64_t step) {
  ZINF_ASSIGN(StateId id, store.define({.unit = "passing",
                                        .state = "weight",
                                        .dtype = "uint8",
                                        .shape = {1 + step % 4000},
                                        .bytes = 1 + step % 4000}));
  Buffer data(1 + step % 4000, step);
  return store.put(id, data.span()).wait();
}

// In the child: step after step, for ever. Tells each committed step.
Status write_for_ever(const StoreOptions& options, int tell) {
  ZINF_ASSIGN(auto store, Store::open(options));
  std::uint64_t step = 0;
  if (!store->versions().empty()) step = store->versions().back().step;
  std::vector<Buffer> buffers;
  for (std::uint64_t size : kSizes) buffers.emplace_back(size);
  while (true) {
    ++step;
    std::vector<Store::Write> writes;
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      ZINF_ASSIGN(StateId id, define(*store, i));
      buffers[i].fill(seed_of(step, i));
      writes.push_back(store->put(id, buffers[i].span()));
    }
    if (auto id = store->find("passing", "weight"); id.ok()) {
      ZINF_TRY(store->remove(*id));
    }
    if (step % 3 == 0) ZINF_TRY(put_passing(*store, step));
    ZINF_TRY(store->end_step(step));
    if (step % 5 == 0) ZINF_TRY(store->reserve(300'000 + 500 * step, 0));
    if (write(tell, &step, sizeof step) != sizeof step) return {};
    if (step % 7 == 0) {
      if (store->find_version("kept").ok()) ZINF_TRY(store->drop("kept"));
      ZINF_TRY(store->keep("kept"));
    }
  }
}

// The version must be that step, bit for bit.
std::string check_version(Store& store, const VersionInfo& version) {
  if (Status status = store.load(version.id); !status.ok()) {
    return status.text();
  }
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    Result<StateId> id = define(store, i);
    if (!id.ok()) return id.status().text();
    Buffer got(kSizes[i], 1);
    Status status = store.get(*id, got.span()).wait();
    if (!status.ok()) return status.text();
    if (!(got == Buffer(kSizes[i], seed_of(version.step, i)))) {
      return "other bytes in " + version.label();
    }
  }
  return "";
}

TEST(StoreKill, EveryRestartFindsTheLastCommittedVersion) {
  TempDir dir;
  StoreOptions options = options_in(dir);
  ASSERT_TRUE(Store::create(options).ok());
  std::mt19937_64 random(20'240);
  std::uint64_t committed = 0;  // that a child has told of
  std::uint64_t in_flight = 0;  // found committed though it could not tell
  int kills_without_commit = 0;
  for (int kill_number = 0; kill_number < kKills; ++kill_number) {
    std::array<int, 2> pipe_fds{};
    ASSERT_EQ(pipe(pipe_fds.data()), 0);
    pid_t child = fork();
    if (child == 0) {
      close(pipe_fds[0]);
      Status status = write_for_ever(options, pipe_fds[1]);
      std::fprintf(stderr, "in the child: %s\n", status.text().c_str());
      _exit(1);
    }
    close(pipe_fds[1]);
    // A few die while they open the store, the others in the middle of steps.
    if (kill_number % 5 != 0) {
      pollfd first{.fd = pipe_fds[0], .events = POLLIN, .revents = 0};
      ASSERT_EQ(poll(&first, 1, 30'000), 1) << "no commit in 30 seconds";
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 25'000));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself";
    std::uint64_t told = 0;
    std::uint64_t last = committed;
    while (read(pipe_fds[0], &told, sizeof told) == sizeof told) last = told;
    close(pipe_fds[0]);
    if (last == committed) ++kills_without_commit;
    committed = last;

    Result<std::unique_ptr<Store>> store = Store::open(options);
    ASSERT_TRUE(store.ok()) << store.status().text();
    std::vector<VersionInfo> versions = (*store)->versions();
    std::uint64_t found = versions.empty() ? 0 : versions.back().step;
    ASSERT_TRUE(found == committed || found == committed + 1)
        << "found step " << found << ", committed was " << committed;
    in_flight += found == committed ? 0 : 1;
    committed = found;
    for (const VersionInfo& version : versions) {
      // Each version has its own.
      if (auto id = (*store)->find("passing", "weight"); id.ok()) {
        ASSERT_TRUE((*store)->remove(*id).ok());
      }
      ASSERT_EQ(check_version(**store, version), "") << "kill " << kill_number;
    }
  }
  EXPECT_GE(committed, 4u * kKills / 5);
  std::printf("%d kills, %llu commits, %llu of them in flight, %d too early\n",
              kKills, static_cast<unsigned long long>(committed),
              static_cast<unsigned long long>(in_flight), kills_without_commit);
}

}  // namespace
}  // namespace zinf
