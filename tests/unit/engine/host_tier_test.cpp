// The host's memory of an engine, above a scratch store on a real disk.
#include "zinf/host_tier.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "src/base/align.h"
#include "tests/support/ok.h"
#include "tests/support/scratch_bytes.h"
#include "tests/support/temp_dir.h"
#include "zinf/disk.h"
#include "zinf/fault_injector.h"

namespace zinf {
namespace {

constexpr std::size_t kBytes = 64 * kKiB;

StateSpec spec(const std::string& unit) {
  return {.unit = unit,
          .state = "weight",
          .dtype = "bytes",
          .shape = {kBytes},
          .bytes = kBytes};
}

class HostTierTest : public testing::Test {
 protected:
  std::shared_ptr<HostTier> make(HostTierOptions options,
                                 std::uint64_t limit_bytes = 0) {
    return ok(HostTier::create(ok(HostMemory::create(limit_bytes)), options,
                               nullptr));
  }
  HostTierOptions on_disk() { return {.nvme = {{dir_.path()}}}; }

  static StateRef add(HostTier& tier, int value, Role role = Role::kWeight) {
    StateRef ref = ok(tier.add(spec(std::to_string(value)), role, nullptr));
    Pin pin = ok(tier.residency().pin(ref, Use::kReplace));
    std::memset(pin.bytes().data(), value, kBytes);
    return ref;
  }
  static int value_of(HostTier& tier, StateRef ref) {
    Pin pin = ok(tier.residency().pin(ref, Use::kRead));
    return static_cast<int>(pin.bytes()[kBytes - 1]);
  }
  std::uint64_t on_nvme() const { return scratch_bytes(dir_.path()); }

  TempDir dir_;
};

TEST_F(HostTierTest, AutoStaysInMemoryWhileItFits) {
  auto tier = make(on_disk());
  StateRef ref = add(*tier, 1);
  EXPECT_EQ(tier->residency().place(ref), Place::kDirty);
  EXPECT_EQ(on_nvme(), 0u) << "no store before it is needed";
}

TEST_F(HostTierTest, KnowsWhatWasMeasuredForItsDisk) {
  EXPECT_EQ(make(on_disk())->stats().tuned.read_bytes_per_second, 0.0);
  ASSERT_TRUE(io::save_profile(dir_.path(), {.block_bytes = 256 * kKiB,
                                             .depth = 4,
                                             .read_gbps = 3,
                                             .write_gbps = 2})
                  .ok());
  auto tier = make(on_disk(), 3 * kBytes);
  EXPECT_EQ(tier->stats().tuned.read_bytes_per_second, 3e9);
  EXPECT_EQ(tier->stats().tuned.write_bytes_per_second, 2e9);
  for (int i = 0; i < 12; ++i) add(*tier, i);
  EXPECT_GT(tier->stats().io_cpu_seconds, 0.0);
}

TEST_F(HostTierTest, ABrokenProfileIsNoReasonToStop) {
  std::ofstream(dir_.path() + "/" + io::kProfileName) << "{";
  auto tier = make(on_disk(), 3 * kBytes);
  EXPECT_EQ(tier->stats().tuned.read_bytes_per_second, 0.0);
  for (int i = 0; i < 12; ++i) add(*tier, i);
}

TEST_F(HostTierTest, ABudgetSendsTheLongestUnusedToNvme) {
  auto tier = make(on_disk(), 3 * kBytes);
  std::vector<StateRef> refs;
  for (int i = 0; i < 12; ++i) refs.push_back(add(*tier, i));
  for (int i = 0; i < 12; ++i) EXPECT_EQ(value_of(*tier, refs[i]), i);
  EXPECT_LE(tier->memory().budget().usage().total.high_bytes, 3 * kBytes);
  EXPECT_GT(on_nvme(), 0u);
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
  tier.reset();
  EXPECT_EQ(on_nvme(), 0u);
}

TEST_F(HostTierTest, ForcedPlacesAreKept) {
  HostTierOptions options = on_disk();
  options.weights = Where::kHost;
  options.states = Where::kNvme;
  auto tier = make(options);
  StateRef weight = add(*tier, 1, Role::kWeight);
  StateRef grad = add(*tier, 2, Role::kGrad);
  StateRef state = add(*tier, 3, Role::kState);
  EXPECT_EQ(tier->residency().place(weight), Place::kDirty);
  EXPECT_EQ(tier->residency().place(grad), Place::kDirty);
  EXPECT_EQ(tier->residency().place(state), Place::kAbsent);
  EXPECT_EQ(value_of(*tier, state), 3);
}

TEST_F(HostTierTest, TheScratchStoreGrowsAndReusesItsRoom) {
  HostTierOptions options = on_disk();
  options.weights = Where::kNvme;
  auto tier = make(options);
  std::uint64_t size = 0;
  for (int round = 0; round < 20; ++round) {
    std::vector<StateRef> refs;
    for (int i = 0; i < 300; ++i) refs.push_back(add(*tier, i % 200));
    for (int i = 0; i < 300; i += 37) {
      EXPECT_EQ(value_of(*tier, refs[i]), i % 200);
    }
    for (StateRef ref : refs) tier->residency().remove(ref);
    if (round == 1) size = tier->stats().nvme_bytes;
  }
  EXPECT_EQ(tier->stats().nvme_bytes, size) << "no growth over a long run";
  EXPECT_EQ(tier->stats().residency.memory_bytes, 0u);
}

TEST_F(HostTierTest, AFlippedBitSticksToItsStateUntilTheContentIsReplaced) {
  auto faults = io::FaultInjector::install();
  HostTierOptions options = on_disk();
  options.weights = Where::kNvme;
  auto tier = make(options);
  StateRef hit = add(*tier, 1);
  StateRef spared = add(*tier, 2);
  faults->set(
      {.kind = io::Fault::Kind::kFlip, .on = io::Operation::kRead, .nth = 1});
  for (int i = 0; i < 2; ++i) {
    Status status = tier->residency().pin(hit, Use::kRead).status();
    EXPECT_EQ(status.code(), Code::kCorrupt) << status.text();
    EXPECT_EQ(status.text().find("1/weight: "), 0u) << status.text();
    EXPECT_NE(status.text().find(" at offset "), std::string::npos)
        << status.text();
    EXPECT_EQ(status.text().find("version"), std::string::npos)
        << status.text();
  }
  EXPECT_EQ(value_of(*tier, spared), 2);
  {
    Pin pin = ok(tier->residency().pin(hit, Use::kReplace));
    std::memset(pin.bytes().data(), 3, kBytes);
  }
  EXPECT_EQ(value_of(*tier, hit), 3);
  io::FaultInjector::remove();
}

TEST_F(HostTierTest, EveryByteOfNvmeIsHashedOnceAWriteAndOnceARead) {
  HostTierOptions options = on_disk();
  options.weights = Where::kNvme;
  auto tier = make(options);
  StateRef ref = add(*tier, 1);
  EXPECT_EQ(tier->stats().checksum_bytes, kBytes);
  EXPECT_EQ(value_of(*tier, ref), 1);
  EXPECT_EQ(tier->stats().checksum_bytes, 2 * kBytes);
  EXPECT_EQ(tier->stats().residency.bytes_read, kBytes);
  tier->set_verify(Verify::kNever);
  EXPECT_EQ(value_of(*tier, ref), 1);
  EXPECT_EQ(tier->stats().checksum_bytes, 2 * kBytes);
}

TEST_F(HostTierTest, RoomOnADiskIsRefusedBeforeItIsNeeded) {
  auto tier = make(on_disk());
  Status status = tier->reserve(std::uint64_t{1} << 50, 10);
  EXPECT_EQ(status.code(), Code::kNoSpace) << status.text();
  EXPECT_NE(status.text().find("needed"), std::string::npos) << status.text();
  EXPECT_NE(status.text().find("found"), std::string::npos) << status.text();
  EXPECT_TRUE(tier->reserve(kMiB, 10).ok());
  EXPECT_EQ(value_of(*tier, add(*tier, 7)), 7);
}

TEST_F(HostTierTest, BadOptionsAreToldAllAtOnce) {
  HostTierOptions options{.nvme = {{"/no/such/place"}}, .states = Where::kNvme};
  Status status = options.validate();
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_NE(status.text().find("/no/such/place"), std::string::npos);
  options = {.weights = Where::kNvme, .states = Where::kNvme};
  status = options.validate();
  EXPECT_NE(status.text().find("weights"), std::string::npos);
  EXPECT_NE(status.text().find("states"), std::string::npos);
}

TEST_F(HostTierTest, OtherMemoryMakesStatesLeave) {
  auto tier = make(on_disk(), 4 * kBytes);
  std::vector<StateRef> refs;
  for (int i = 0; i < 4; ++i) refs.push_back(add(*tier, i));
  {
    Reservation other =
        tier->memory().reserve_or_exceed(Tag::kTensor, 2 * kBytes);
    EXPECT_LE(tier->stats().residency.memory_bytes, 2 * kBytes);
    EXPECT_LE(tier->memory().budget().usage().total.used_bytes, 4 * kBytes);
    Reservation more =
        tier->memory().reserve_or_exceed(Tag::kTensor, 8 * kBytes);
    EXPECT_GT(tier->memory().budget().usage().total.used_bytes, 4 * kBytes)
        << "what cannot be refused is counted all the same";
  }
  for (int i = 0; i < 4; ++i) EXPECT_EQ(value_of(*tier, refs[i]), i);
}

}  // namespace
}  // namespace zinf
