// Ranks that train together, as threads: each keeps slices in memory, and an
// update subtracts the mean of the gradients.
#include "zinf/exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "src/base/mutex.h"
#include "src/base/strf.h"
#include "zinf/collectives.h"

namespace zinf {
namespace {

using Floats = std::vector<float>;

const std::vector<std::uint64_t> kSizes = {1000, 200, 64, 65, 4096, 0, 300, 1};

float start_of(std::uint32_t unit, std::uint64_t element) {
  return static_cast<float>(unit) + static_cast<float>(element % 97) * 0.125F;
}

Floats start_of(std::uint32_t unit) {
  Floats weight(kSizes[unit]);
  for (std::uint64_t i = 0; i < weight.size(); ++i) {
    weight[i] = start_of(unit, i);
  }
  return weight;
}

// Another sum in another order.
Floats gradient_of(int rank, std::uint32_t unit, std::uint64_t pass) {
  std::minstd_rand random(static_cast<unsigned>(
      1 + rank + 10 * static_cast<int>(unit) + 1000 * static_cast<int>(pass)));
  Floats gradient(kSizes[unit]);
  for (float& value : gradient) {
    value =
        static_cast<float>(random() % 1000) * (rank % 2 == 0 ? 1e3F : 1e-3F);
  }
  return gradient;
}

void update(std::span<float> weight,
            const std::vector<std::span<const float>>& parts, int ranks) {
  for (std::size_t i = 0; i < weight.size(); ++i) {
    float sum = 0;
    for (std::span<const float> part : parts) {
      if (!part.empty()) sum += part[i];
    }
    weight[i] -= 0.001F * (sum * (1.0F / static_cast<float>(ranks)));
  }
}

// Whether a rank has a gradient for a unit in a pass.
using Uses =
    std::function<bool(int rank, std::uint32_t unit, std::uint64_t pass)>;
bool always(int, std::uint32_t, std::uint64_t) { return true; }

// After so many passes.
Floats expected(std::uint32_t unit, std::uint64_t passes, int ranks,
                const Uses& uses) {
  Floats weight = start_of(unit);
  for (std::uint64_t pass = 0; pass < passes; ++pass) {
    std::vector<Floats> gradients(static_cast<std::size_t>(ranks));
    bool any = false;
    for (int rank = 0; rank < ranks; ++rank) {
      if (!uses(rank, unit, pass)) continue;
      gradients[static_cast<std::size_t>(rank)] = gradient_of(rank, unit, pass);
      any = true;
    }
    if (any) update(weight, {gradients.begin(), gradients.end()}, ranks);
  }
  return weight;
}

std::span<float> floats(const Block& block) {
  return {reinterpret_cast<float*>(block.bytes.data()),
          block.bytes.size() / sizeof(float)};
}

Block block_of(std::size_t bytes) {
  auto memory = std::make_shared<Floats>(bytes / sizeof(float));
  return {std::as_writable_bytes(std::span(*memory)), memory};
}

class Rank final : public Keeper {
 public:
  explicit Rank(std::shared_ptr<Comm> comm) : comm_(std::move(comm)) {
    exchange = std::move(Exchange::create(comm_, *this)).value();
  }
  ~Rank() override { exchange.reset(); }

  void build(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      MutexLock lock(mutex_);
      const auto unit = static_cast<std::uint32_t>(slices_.size());
      const Slice mine =
          Partition(kSizes[unit], comm_->size()).slice(comm_->rank());
      const Floats whole = start_of(unit);
      slices_.emplace_back(whole.begin() + static_cast<long>(mine.begin),
                           whole.begin() + static_cast<long>(mine.end));
      EXPECT_EQ(exchange->add({name, kSizes[unit], sizeof(float)}), unit);
    }
  }
  void build() {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      names.push_back(strf("layers.%zu.weight", i));
    }
    build(names);
  }

  Result<Block> slice(std::uint32_t unit, std::uint64_t passes) override {
    MutexLock lock(mutex_);
    if (fails_at == unit) {
      return Status::error(Code::kIo, "read of the disk: it is broken");
    }
    EXPECT_GE(passes, 0u);
    Block copy = block_of(slices_[unit].size() * sizeof(float));
    std::ranges::copy(slices_[unit], floats(copy).begin());
    return copy;
  }
  Result<Block> room(const PartName& part, std::size_t bytes) override {
    MutexLock lock(mutex_);
    return parts_[part] = block_of(bytes);
  }
  Status take(std::uint32_t unit, std::uint64_t pass,
              const std::vector<int>& ranks) override {
    MutexLock lock(mutex_);
    std::vector<std::span<const float>> parts;
    for (int rank : ranks)
      parts.emplace_back(floats(parts_.at({unit, pass, rank})));
    update(slices_[unit], parts, comm_->size());
    for (int rank : ranks) parts_.erase({unit, pass, rank});
    return {};
  }
  Status pass_over(std::uint64_t pass) override {
    MutexLock lock(mutex_);
    EXPECT_EQ(pass, passes_over_++);
    return {};
  }

  Result<Floats> read(std::uint32_t unit, std::uint64_t passes) {
    Floats whole(kSizes[unit]);
    auto move =
        exchange->pull(unit, passes, std::as_writable_bytes(std::span(whole)));
    ZINF_TRY(exchange->settled(unit, passes));
    const Slice mine = exchange->partition(unit).slice(comm_->rank());
    Result<Block> own = slice(unit, passes);
    if (!own.ok()) {
      exchange->fail(own.status());
      return own.status();
    }
    std::ranges::copy(floats(*own),
                      whole.begin() + static_cast<long>(mine.begin));
    ZINF_TRY(move->wait());
    return whole;
  }

  std::unique_ptr<Move> edit(std::uint32_t unit, float value) {
    exchange->announce_change(unit);
    return exchange->change(unit, [this, unit, value] {
      MutexLock lock(mutex_);
      std::ranges::fill(slices_[unit], value);
      return Status();
    });
  }

  // One pass, over the units in this order.
  Status train(std::uint64_t pass, const std::vector<std::uint32_t>& order,
               const Uses& uses) {
    std::vector<std::unique_ptr<Move>> moves;
    std::vector<Floats> gradients;
    gradients.reserve(order.size());
    for (std::uint32_t unit : order) {
      if (!uses(comm_->rank(), unit, pass)) continue;
      ZINF_ASSIGN(Floats weight, read(unit, pass));
      EXPECT_EQ(weight, expected(unit, pass, comm_->size(), uses));
      gradients.push_back(gradient_of(comm_->rank(), unit, pass));
      moves.push_back(exchange->push(
          unit, pass, std::as_bytes(std::span(gradients.back()))));
    }
    moves.push_back(exchange->close_pass(pass, "a pass"));
    for (const auto& move : moves) ZINF_TRY(move->wait());
    return exchange->status();
  }

  int number() const { return comm_->rank(); }
  Comm& comm() { return *comm_; }

  std::unique_ptr<Exchange> exchange;
  std::atomic<std::uint32_t> fails_at = ~0U;

 private:
  const std::shared_ptr<Comm> comm_;
  Mutex mutex_;
  std::vector<Floats> slices_ ZINF_GUARDED_BY(mutex_);
  std::map<PartName, Block> parts_ ZINF_GUARDED_BY(mutex_);
  std::uint64_t passes_over_ ZINF_GUARDED_BY(mutex_) = 0;
};

std::vector<std::uint32_t> in_order() {
  std::vector<std::uint32_t> order(kSizes.size());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// What each rank says, on a thread of its own.
std::vector<Status> run(int size, const std::function<Status(Rank&)>& body) {
  auto ends = make_thread_group(size);
  std::vector<Status> outcomes(ends.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    threads.emplace_back([&, i] {
      Rank rank(std::move(ends[i]));
      outcomes[i] = body(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

void expect_all_ok(const std::vector<Status>& outcomes) {
  for (const Status& outcome : outcomes) {
    EXPECT_TRUE(outcome.ok()) << outcome.text();
  }
}

class ExchangeOf : public testing::TestWithParam<int> {};

TEST_P(ExchangeOf, EveryRankSeesWhatOneWouldHaveMade) {
  const int size = GetParam();
  expect_all_ok(run(size, [&](Rank& rank) -> Status {
    rank.build();
    for (std::uint64_t pass = 0; pass < 5; ++pass) {
      ZINF_TRY(rank.train(pass, in_order(), always));
    }
    for (std::uint32_t unit : in_order()) {
      ZINF_ASSIGN(Floats weight, rank.read(unit, 5));
      EXPECT_EQ(weight, expected(unit, 5, size, always));
    }
    return rank.exchange->finish();
  }));
}

TEST_P(ExchangeOf, RanksMayUseDifferentUnitsInDifferentOrders) {
  const int size = GetParam();
  const Uses some = [](int rank, std::uint32_t unit, std::uint64_t pass) {
    return (static_cast<std::uint64_t>(rank) * 7 + unit * 3 + pass) % 3 != 0;
  };
  expect_all_ok(run(size, [&](Rank& rank) -> Status {
    rank.build();
    std::minstd_rand random(static_cast<unsigned>(rank.number() + 1));
    for (std::uint64_t pass = 0; pass < 8; ++pass) {
      std::vector<std::uint32_t> order = in_order();
      std::shuffle(order.begin(), order.end(), random);
      ZINF_TRY(rank.train(pass, order, some));
    }
    for (std::uint32_t unit : in_order()) {
      ZINF_ASSIGN(Floats weight, rank.read(unit, 8));
      EXPECT_EQ(weight, expected(unit, 8, size, some));
    }
    return rank.exchange->finish();
  }));
}

TEST_P(ExchangeOf, OneRankMayReadWhatItLikesMeanwhile) {
  const int size = GetParam();
  expect_all_ok(run(size, [&](Rank& rank) -> Status {
    rank.build();
    for (std::uint64_t pass = 0; pass < 4; ++pass) {
      for (int i = 0; i < (rank.number() == 0 ? 20 : 0); ++i) {
        ZINF_ASSIGN(Floats weight,
                    rank.read(static_cast<unsigned>(i) % 7, pass));
        EXPECT_EQ(weight,
                  expected(static_cast<unsigned>(i) % 7, pass, size, always));
      }
      ZINF_TRY(rank.train(pass, in_order(), always));
    }
    return rank.exchange->finish();
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, ExchangeOf, testing::Values(1, 2, 3, 4));

TEST(Exchange, SmallSlicesAreAskedForTogether) {
  const auto outcomes = run(2, [](Rank& rank) -> Status {
    rank.build();
    ZINF_TRY(barrier(rank.comm())->wait());
    auto requests = [&] {
      const auto lane = static_cast<std::size_t>(Lane::kRequests);
      return rank.comm().stats().sent[lane].messages;
    };
    const std::uint64_t before = requests();
    std::vector<Floats> wholes;
    std::vector<std::unique_ptr<Move>> moves;
    for (std::uint32_t unit = 0; unit < kSizes.size(); ++unit) {
      wholes.emplace_back(kSizes[unit]);
      moves.push_back(rank.exchange->pull(
          unit, 0, std::as_writable_bytes(std::span(wholes.back()))));
    }
    EXPECT_EQ(requests(), before) << "nobody needs them yet";
    for (const auto& move : moves) ZINF_TRY(move->wait());
    EXPECT_EQ(requests(), before + 2) << "a head, and what it is about";
    const int other = 1 - rank.number();
    for (std::uint32_t unit = 0; unit < kSizes.size(); ++unit) {
      const Slice theirs = rank.exchange->partition(unit).slice(other);
      const Floats all = start_of(unit);
      for (std::uint64_t i = theirs.begin; i < theirs.end; ++i) {
        EXPECT_EQ(wholes[unit][i], all[i]);
      }
    }
    return rank.exchange->finish();
  });
  for (const Status& outcome : outcomes) EXPECT_TRUE(outcome.ok());
}

TEST(Exchange, OtherModelsAreToldOnAllRanks) {
  const auto outcomes = run(3, [](Rank& rank) -> Status {
    rank.build(rank.number() == 1
                   ? std::vector<std::string>{"first", "other"}
                   : std::vector<std::string>{"first", "second"});
    ZINF_TRY(rank.train(0, {0, 1}, always));
    return rank.exchange->finish();
  });
  for (const Status& outcome : outcomes) {
    EXPECT_NE(outcome.text().find("parameter 1 is \""), std::string::npos)
        << outcome.text();
    EXPECT_NE(outcome.text().find("\"second\""), std::string::npos);
    EXPECT_NE(outcome.text().find("\"other\""), std::string::npos);
  }
}

TEST(Exchange, ARankWithFewerParametersIsTold) {
  const auto outcomes = run(2, [](Rank& rank) -> Status {
    rank.build(rank.number() == 1
                   ? std::vector<std::string>{"first"}
                   : std::vector<std::string>{"first", "second"});
    ZINF_TRY(rank.train(0,
                        rank.number() == 1 ? std::vector<std::uint32_t>{0}
                                           : std::vector<std::uint32_t>{0, 1},
                        always));
    return rank.exchange->finish();
  });
  for (const Status& outcome : outcomes) {
    EXPECT_NE(outcome.text().find("1 parameters"), std::string::npos)
        << outcome.text();
  }
}

TEST(Exchange, AFailureReachesAllRanks) {
  const auto outcomes = run(3, [](Rank& rank) -> Status {
    if (rank.number() == 1) rank.fails_at = 4;
    rank.build();
    ZINF_TRY(rank.train(0, in_order(), always));
    return rank.exchange->finish();
  });
  for (const Status& outcome : outcomes) {
    EXPECT_NE(outcome.text().find("it is broken"), std::string::npos)
        << outcome.text();
  }
  EXPECT_NE(outcomes[0].text().find("rank 1 of 3 failed: "), std::string::npos);
}

TEST(Exchange, ARankThatIsGoneIsNamedByTheOthers) {
  const auto outcomes = run(3, [](Rank& rank) -> Status {
    rank.build();
    ZINF_TRY(rank.train(0, in_order(), always));
    if (rank.number() == 2) return {};  // without finish()
    ZINF_TRY(rank.train(1, in_order(), always));
    return rank.exchange->finish();
  });
  for (int rank : {0, 1}) {
    const Status& outcome = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_EQ(outcome.code(), Code::kGone);
    EXPECT_NE(outcome.text().find("rank 2 of 3 is gone"), std::string::npos)
        << outcome.text();
  }
}

TEST(Exchange, ARankThatFinishesEarlyIsNamed) {
  const auto outcomes = run(2, [](Rank& rank) -> Status {
    rank.build();
    ZINF_TRY(rank.train(0, in_order(), always));
    if (rank.number() == 1) return rank.exchange->finish();
    ZINF_TRY(rank.train(1, in_order(), always));
    return rank.exchange->finish();
  });
  EXPECT_NE(outcomes[0].text().find("it has ended after 1 backward passes"),
            std::string::npos)
      << outcomes[0].text();
}

TEST(Exchange, AnAnswerWaitsForTheReadersOwnChanges) {
  expect_all_ok(run(3, [](Rank& rank) -> Status {
    rank.build();
    if (rank.number() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    ZINF_TRY(rank.edit(4, 3.5F)->wait());
    ZINF_ASSIGN(Floats weight, rank.read(4, 0));
    EXPECT_EQ(weight, Floats(kSizes[4], 3.5F));
    return rank.exchange->finish();
  }));
}

TEST(Exchange, AChangeWaitsForWhoReadsTheOldContent) {
  expect_all_ok(run(3, [](Rank& rank) -> Status {
    rank.build();
    std::unique_ptr<Move> change;
    if (rank.number() == 0) change = rank.edit(4, 3.5F);
    ZINF_TRY(barrier(rank.comm())->wait());
    if (rank.number() != 0) {
      ZINF_ASSIGN(Floats weight, rank.read(4, 0));
      EXPECT_EQ(weight, start_of(4));
      change = rank.edit(4, 3.5F);
    }
    ZINF_TRY(change->wait());
    ZINF_ASSIGN(Floats weight, rank.read(4, 0));
    EXPECT_EQ(weight, Floats(kSizes[4], 3.5F));
    return rank.exchange->finish();
  }));
}

TEST(Exchange, DifferentContentsAreToldOnAllRanks) {
  for (int odd_one : {0, 1, 2}) {
    const auto outcomes = run(3, [&](Rank& rank) -> Status {
      rank.build();
      const bool is_odd = rank.number() == odd_one;
      rank.exchange->announce_change(4);
      rank.exchange->note_content(4, is_odd ? 8 : 7);
      ZINF_TRY(rank.exchange->change(4, [] { return Status(); })->wait());
      ZINF_TRY(rank.train(0, {0, 1}, always));
      return rank.exchange->finish();
    });
    for (const Status& outcome : outcomes) {
      EXPECT_NE(outcome.text().find("have changed \"layers.4.weight\" outside "
                                    "of training to different values"),
                std::string::npos)
          << outcome.text();
      EXPECT_NE(outcome.text().find(strf("rank %d", odd_one)),
                std::string::npos)
          << outcome.text();
    }
  }
}

TEST(Exchange, ContentsThatAreTheSameAgainBeforeAPassAreNotTold) {
  expect_all_ok(run(3, [](Rank& rank) -> Status {
    rank.build();
    const auto own = static_cast<std::uint64_t>(rank.number());
    for (const std::uint64_t hash : {10 + own, std::uint64_t{7}}) {
      rank.exchange->announce_change(4);
      rank.exchange->note_content(4, hash);
      ZINF_TRY(rank.exchange->change(4, [] { return Status(); })->wait());
    }
    EXPECT_EQ(rank.exchange->contents().at(4), 7U);
    ZINF_TRY(rank.train(0, in_order(), always));
    return rank.exchange->finish();
  }));
}

TEST(Exchange, AChangeThatOnlyOneRankMakesIsTold) {
  const auto outcomes = run(2, [](Rank& rank) -> Status {
    rank.build();
    std::unique_ptr<Move> change;
    if (rank.number() == 0) change = rank.edit(4, 3.5F);
    ZINF_TRY(rank.train(0,
                        rank.number() == 0 ? std::vector<std::uint32_t>{4}
                                           : std::vector<std::uint32_t>{0},
                        always));
    return rank.exchange->finish();
  });
  for (const Status& outcome : outcomes) {
    EXPECT_NE(outcome.text().find("rank 0 has changed \"layers.4.weight\" "
                                  "outside of training, rank 1 has not"),
              std::string::npos)
        << outcome.text();
  }
}

TEST(Exchange, WhatAPassHasBroughtIsKnownToAll) {
  const Uses some = [](int rank, std::uint32_t unit, std::uint64_t) {
    return unit == 2 || unit == static_cast<std::uint32_t>(rank);
  };
  expect_all_ok(run(2, [&](Rank& rank) -> Status {
    rank.build();
    ZINF_TRY(rank.train(0, in_order(), some));
    ZINF_ASSIGN(const auto units, rank.exchange->wait_closed(0));
    EXPECT_EQ(units, (std::vector<std::uint32_t>{0, 1, 2}));
    return rank.exchange->finish();
  }));
}

TEST(Exchange, RanksThatCloseOtherThingsAreTold) {
  const auto outcomes = run(2, [](Rank& rank) -> Status {
    rank.build();
    const char* what = rank.number() == 0 ? "a backward pass" : "a step";
    ZINF_TRY(rank.exchange->close_pass(0, what)->wait());
    ZINF_TRY(rank.exchange->wait_closed(0).status());
    return rank.exchange->finish();
  });
  for (const Status& outcome : outcomes) {
    EXPECT_NE(outcome.text().find("all ranks must make the same backward "
                                  "passes and steps"),
              std::string::npos)
        << outcome.text();
  }
}

TEST(Exchange, OneThatIsNotFastIsWaitedFor) {
  expect_all_ok(run(3, [](Rank& rank) -> Status {
    if (rank.number() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    rank.build();
    for (std::uint64_t pass = 0; pass < 3; ++pass) {
      ZINF_TRY(rank.train(pass, in_order(), always));
    }
    if (rank.number() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return rank.exchange->finish();
  }));
}

}  // namespace
}  // namespace zinf
