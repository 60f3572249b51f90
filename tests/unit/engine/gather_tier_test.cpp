// Ranks as threads, each with memory and a disk of its own: whole units above
// slices.
#include "zinf/gather_tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "src/base/align.h"
#include "src/base/strf.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

namespace zinf {
namespace {

constexpr std::uint64_t kElements = 40'000;
constexpr std::uint64_t kBytes = kElements * sizeof(float);
constexpr int kUnits = 12;

float start_of(int unit, std::uint64_t element) {
  return static_cast<float>(unit * 1000) + static_cast<float>(element % 777);
}

// Every pass adds the sum over ranks of (rank + 1) to everything.
float after(int unit, std::uint64_t element, std::uint64_t passes, int ranks) {
  float value = start_of(unit, element);
  for (std::uint64_t pass = 0; pass < passes; ++pass) {
    value += static_cast<float>(ranks * (ranks + 1) / 2);
  }
  return value;
}

std::span<float> floats(std::span<std::byte> bytes) {
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

class Rank {
 public:
  Rank(std::shared_ptr<Comm> comm, std::uint64_t limit_bytes)
      : rank_(comm->rank()), size_(comm->size()), comm_(comm) {
    host_ = ok(HostTier::create(ok(HostMemory::create(limit_bytes)),
                                {.nvme = {{dir_.path()}}}, nullptr));
    gather_ = ok(GatherTier::create(
        *host_, std::move(comm),
        {.add_part = [this](const PartName& part,
                            std::span<const std::byte> bytes) {
          return update(part.unit, bytes);
        }}));
    for (int unit = 0; unit < kUnits; ++unit) build(unit);
  }
  ~Rank() { gather_.reset(); }

  Status check(int unit, std::uint64_t passes) {
    ZINF_ASSIGN(Pin pin, residency().pin(whole(unit), Use::kRead));
    std::span<float> values = floats(pin.bytes());
    for (std::uint64_t i = 0; i < kElements; i += 97) {
      if (values[i] != after(unit, i, passes, size_)) {
        return Status::error(
            Code::kCorrupt,
            strf("rank %d, unit %d, element %zu: %g after %zu passes", rank_,
                 unit, static_cast<std::size_t>(i),
                 static_cast<double>(values[i]),
                 static_cast<std::size_t>(passes)));
      }
    }
    return {};
  }

  Status train(std::uint64_t pass) {
    std::vector<float> gradient(kElements, static_cast<float>(rank_ + 1));
    for (int unit = 0; unit < kUnits; ++unit) ZINF_TRY(check(unit, pass));
    std::vector<std::unique_ptr<Move>> moves;
    for (int unit = kUnits; unit-- > 0;) {
      ZINF_TRY(check(unit, pass));
      moves.push_back(
          gather_->exchange().push(static_cast<std::uint32_t>(unit), pass,
                                   std::as_bytes(std::span(gradient))));
    }
    moves.push_back(gather_->exchange().close_pass(pass, "a pass"));
    for (const auto& move : moves) ZINF_TRY(move->wait());
    gather_->set_passes(pass + 1);
    for (int unit = 0; unit < kUnits; ++unit) {
      ZINF_TRY(gather_->outdate(split(unit)));
    }
    return {};
  }

  const GatherTier::Split& split(int unit) const {
    return splits_[static_cast<std::size_t>(unit)];
  }
  StateRef whole(int unit) const { return split(unit).whole; }
  Residency& residency() { return gather_->residency(); }
  GatherTier& gather() { return *gather_; }
  HostTier& host() { return *host_; }

 private:
  void build(int unit) {
    const Partition partition(kElements, size_);
    const std::string name = strf("layers.%d", unit);
    const std::uint64_t bytes = partition.slice_elements() * sizeof(float);
    StateRef slice = ok(host_->add({.unit = name,
                                    .state = "weight",
                                    .dtype = "bytes",
                                    .shape = {bytes},
                                    .bytes = bytes},
                                   Role::kWeight, nullptr));
    Pin pin = ok(host_->residency().pin(slice, Use::kReplace));
    const Slice mine = partition.slice(rank_);
    std::span<float> values = floats(pin.bytes());
    for (std::uint64_t i = 0; i < mine.size(); ++i) {
      values[i] = start_of(unit, mine.begin + i);
    }
    slices_.push_back(slice);
    const std::uint32_t number =
        gather_->add({name, kElements, sizeof(float)}, slice);
    splits_.push_back(
        ok(gather_->open(number, GatherTier::Content::kInSlices, nullptr)));
  }

  Status update(std::uint32_t unit, std::span<const std::byte> part) {
    ZINF_ASSIGN(Pin pin, host_->residency().pin(slices_[unit], Use::kChange));
    std::span<float> values = floats(pin.bytes());
    const auto* add = reinterpret_cast<const float*>(part.data());
    for (std::size_t i = 0; i < part.size() / sizeof(float); ++i) {
      values[i] += add[i];
    }
    return {};
  }

  const int rank_;
  const int size_;
  const std::shared_ptr<Comm> comm_;
  TempDir dir_;
  std::shared_ptr<HostTier> host_;
  std::unique_ptr<GatherTier> gather_;
  std::vector<StateRef> slices_;
  std::vector<GatherTier::Split> splits_;
};

std::vector<Status> run(int size, std::uint64_t limit_bytes,
                        const std::function<Status(Rank&)>& body) {
  auto ends = make_thread_group(size);
  std::vector<Status> outcomes(ends.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    threads.emplace_back([&, i] {
      Rank rank(std::move(ends[i]), limit_bytes);
      outcomes[i] = body(rank);
      if (outcomes[i].ok()) outcomes[i] = rank.gather().finish();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

class GatherTierOf : public testing::TestWithParam<int> {};

TEST_P(GatherTierOf, EveryRankReadsTheWholeAfterEveryPass) {
  for (const std::uint64_t limit : {std::uint64_t{0}, 6 * kBytes}) {
    const auto outcomes = run(GetParam(), limit, [&](Rank& rank) -> Status {
      for (std::uint64_t pass = 0; pass < 3; ++pass) {
        ZINF_TRY(rank.train(pass));
      }
      for (int unit = 0; unit < kUnits; ++unit) ZINF_TRY(rank.check(unit, 3));
      BudgetUsage usage = rank.host().memory().budget().usage();
      EXPECT_LE(usage.total.used_bytes, limit > 0 ? limit : ~limit);
      return {};
    });
    for (const Status& outcome : outcomes) {
      EXPECT_TRUE(outcome.ok()) << outcome.text();
    }
  }
}

TEST_P(GatherTierOf, AChangeOfTheWholeIsKeptInTheSlices) {
  const auto outcomes = run(GetParam(), 0, [](Rank& rank) -> Status {
    {
      ZINF_ASSIGN(Pin pin, rank.residency().pin(rank.whole(3), Use::kChange));
      rank.gather().exchange().announce_change(3);
      for (float& value : floats(pin.bytes())) value = 5;
    }
    ZINF_TRY(rank.residency().flush());
    ZINF_TRY(rank.gather().outdate(rank.split(3)));
    ZINF_ASSIGN(Pin pin, rank.residency().pin(rank.whole(3), Use::kRead));
    EXPECT_TRUE(std::ranges::all_of(floats(pin.bytes()),
                                    [](float value) { return value == 5; }));
    return {};
  });
  for (const Status& outcome : outcomes) {
    EXPECT_TRUE(outcome.ok()) << outcome.text();
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GatherTierOf, testing::Values(1, 2, 3));

}  // namespace
}  // namespace zinf
