#include "tests/support/comm_suite.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

#include "src/base/strf.h"
#include "zinf/collectives.h"

namespace zinf {
namespace {

using Bytes = std::vector<std::byte>;

void expect(bool good, const char* what) {
  if (!good) throw std::runtime_error(what);
}

void expect_ok(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.text());
}

std::size_t number(int rank) { return static_cast<std::size_t>(rank); }

// Others for others: who sends to whom, and which message it is.
Bytes content(int from, int to, int index, std::size_t bytes) {
  std::minstd_rand random(
      static_cast<unsigned>(1 + from + 100 * to + 10000 * index));
  Bytes made(bytes);
  for (std::byte& byte : made) byte = static_cast<std::byte>(random());
  return made;
}

void for_others(const Comm& comm, const std::function<void(int)>& what) {
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (rank != comm.rank()) what(rank);
  }
}

// Messages with their memory.
class Mail {
 public:
  explicit Mail(Comm& comm) : comm_(comm) {}

  void send(int to, Lane lane, Bytes what) {
    kept_.push_back(std::make_unique<Bytes>(std::move(what)));
    moves_.push_back(comm_.send(to, lane, *kept_.back()));
  }
  void receive(int from, Lane lane, Bytes expected) {
    kept_.push_back(std::make_unique<Bytes>(expected.size(), std::byte{0xEE}));
    moves_.push_back(comm_.receive(from, lane, *kept_.back()));
    expected_.emplace_back(kept_.back().get(), std::move(expected));
  }
  void check() {
    for (const auto& move : moves_) expect_ok(move->wait());
    for (const auto& move : moves_) expect(move->done(), "over, but not done");
    for (const auto& [got, expected] : expected_) {
      expect(*got == expected, "another content than was sent");
    }
    moves_.clear();
  }

 private:
  Comm& comm_;
  std::vector<std::unique_ptr<Bytes>> kept_;
  std::vector<std::pair<Bytes*, Bytes>> expected_;
  std::vector<std::unique_ptr<Move>> moves_;
};

void messages_arrive_in_order(Comm& comm) {
  Mail mail(comm);
  for (int i = 0; i < 20; ++i) {
    const std::size_t bytes = 1 + number(i) * number(i) * 37;
    for_others(comm, [&](int rank) {
      mail.send(rank, Lane::kGrads, content(comm.rank(), rank, i, bytes));
      mail.receive(rank, Lane::kGrads, content(rank, comm.rank(), i, bytes));
    });
  }
  mail.check();
}

// Nobody has posted a receive when the sends begin, or nobody a send.
void either_end_may_be_first(Comm& comm) {
  constexpr std::size_t kLarge = 3 << 20;
  for (const bool sends_first : {true, false}) {
    Mail mail(comm);
    const auto post = [&](bool sends) {
      for_others(comm, [&](int rank) {
        if (sends) {
          mail.send(rank, Lane::kWeights,
                    content(comm.rank(), rank, 0, kLarge));
        } else {
          mail.receive(rank, Lane::kWeights,
                       content(rank, comm.rank(), 0, kLarge));
        }
      });
    };
    post(sends_first);
    expect_ok(barrier(comm)->wait());
    post(!sends_first);
    mail.check();
  }
}

// The answer on a lane that has waited since before the question.
void lanes_do_not_wait_for_each_other(Comm& comm) {
  for_others(comm, [&](int rank) {
    Mail answer(comm);
    Mail question(comm);
    if (comm.rank() < rank) {
      answer.receive(rank, Lane::kWeights, content(rank, comm.rank(), 1, 5000));
      question.send(rank, Lane::kRequests, content(comm.rank(), rank, 0, 64));
      question.check();
      answer.check();
    } else {
      question.receive(rank, Lane::kRequests,
                       content(rank, comm.rank(), 0, 64));
      question.check();
      answer.send(rank, Lane::kWeights, content(comm.rank(), rank, 1, 5000));
      answer.check();
    }
  });
}

void empty_messages_are_messages(Comm& comm) {
  Mail mail(comm);
  for_others(comm, [&](int rank) {
    for (int i = 0; i < 3; ++i) {
      mail.send(rank, Lane::kRequests, {});
      mail.receive(rank, Lane::kRequests, {});
    }
  });
  mail.check();
}

// Several threads, many messages, all lanes.
void random_traffic(Comm& comm) {
  constexpr int kMessages = 60;
  std::vector<std::thread> threads;
  std::vector<std::string> errors(kNumLanes);
  for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
    threads.emplace_back([&, lane] {
      try {
        std::minstd_rand random(static_cast<unsigned>(lane + 7));
        Mail mail(comm);
        for (int i = 0; i < kMessages; ++i) {
          const std::size_t bytes = random() % (i % 10 == 0 ? 200'000 : 2'000);
          for_others(comm, [&](int rank) {
            const auto way = static_cast<Lane>(lane);
            const int index = i + 1000 * static_cast<int>(lane);
            mail.send(rank, way, content(comm.rank(), rank, index, bytes));
            mail.receive(rank, way, content(rank, comm.rank(), index, bytes));
          });
          if (i % 7 == 0) mail.check();
        }
        mail.check();
      } catch (const std::exception& error) {
        errors[lane] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) expect(error.empty(), error.c_str());
}

void everybody_gathers_all(Comm& comm) {
  for (const std::size_t bytes : {0, 1, 4097, 1 << 20}) {
    const bool in_place = bytes % 2 == 1;
    Bytes all(bytes * number(comm.size()), std::byte{0xEE});
    Bytes own = content(comm.rank(), 0, 0, bytes);
    std::span<std::byte> mine =
        std::span(all).subspan(bytes * number(comm.rank()), bytes);
    if (in_place) std::ranges::copy(own, mine.begin());
    expect_ok(all_gather(comm, in_place ? mine : std::span(own), all)->wait());
    Bytes expected;
    for (int rank = 0; rank < comm.size(); ++rank) {
      const Bytes part = content(rank, 0, 0, bytes);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    expect(all == expected, "another content was gathered");
  }
}

// Large and small values by turns: another order gives another sum.
float value(int rank, std::size_t index) {
  std::minstd_rand random(
      static_cast<unsigned>(1 + rank + 1000 * static_cast<int>(index)));
  const float small = static_cast<float>(random() % 10000) * 1e-4F;
  return rank % 2 == 0 ? small * 1e7F : small;
}

template <typename T>
T sum_of_values(const Comm& comm, std::size_t index) {
  T sum = static_cast<T>(value(0, index));
  for (int rank = 1; rank < comm.size(); ++rank) {
    sum += static_cast<T>(value(rank, index));
  }
  return sum;
}

void sums_are_scattered_in_rank_order(Comm& comm) {
  for (const std::size_t each : {1, 1000, 100'000}) {
    std::vector<float> all(each * number(comm.size()));
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = value(comm.rank(), i);
    std::vector<float> apart(each);
    const std::size_t begin = each * number(comm.rank());
    const bool in_place = each == 1000;
    std::span<float> own =
        in_place ? std::span(all).subspan(begin, each) : std::span(apart);
    expect_ok(reduce_scatter(comm, all, own)->wait());
    for (std::size_t i = 0; i < each; ++i) {
      expect(own[i] == sum_of_values<float>(comm, begin + i), "another sum");
    }
  }
}

template <typename T>
void check_all_reduce(Comm& comm) {
  std::vector<T> values(77);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<T>(value(comm.rank(), i));
  }
  expect_ok(all_reduce(comm, std::span(values))->wait());
  for (std::size_t i = 0; i < values.size(); ++i) {
    expect(values[i] == sum_of_values<T>(comm, i), "another sum");
  }
}

void everybody_has_the_same_sum(Comm& comm) {
  check_all_reduce<float>(comm);
  check_all_reduce<double>(comm);
}

void everybody_has_what_the_root_had(Comm& comm) {
  for (int root = 0; root < comm.size(); ++root) {
    const Bytes theirs = content(root, 0, 5, 30'000);
    Bytes mine = comm.rank() == root ? theirs : Bytes(theirs.size());
    expect_ok(broadcast(comm, root, mine)->wait());
    expect(mine == theirs, "another content than the root's");
  }
}

// Ranks of one machine have one clock.
void nobody_leaves_a_barrier_before_all_have_come(Comm& comm) {
  for (int slow = 0; slow < comm.size(); ++slow) {
    if (comm.rank() == slow) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    const auto now = [] {
      return std::chrono::steady_clock::now().time_since_epoch().count();
    };
    auto came = now();
    expect_ok(barrier(comm)->wait());
    const auto left = now();
    std::vector<decltype(came)> all(number(comm.size()));
    expect_ok(all_gather(comm, std::as_bytes(std::span(&came, 1)),
                         std::as_writable_bytes(std::span(all)))
                  ->wait());
    expect(left >= *std::ranges::max_element(all), "left before all had come");
  }
}

// Started in one order, waited for in the other.
void many_collectives_are_under_way_at_once(Comm& comm) {
  constexpr std::size_t kCount = 30;
  std::vector<std::vector<float>> values(kCount);
  std::vector<std::unique_ptr<Move>> moves;
  for (std::size_t i = 0; i < kCount; ++i) {
    values[i].assign(1 + 500 * i, value(comm.rank(), i));
    moves.push_back(all_reduce(comm, std::span(values[i])));
  }
  for (std::size_t i = kCount; i-- > 0;) {
    expect_ok(moves[i]->wait());
    expect(values[i].back() == sum_of_values<float>(comm, i), "another sum");
  }
}

void bytes_are_counted(Comm& comm) {
  const CommStats before = comm.stats();
  std::vector<float> all(1000 * number(comm.size()));
  expect_ok(reduce_scatter(comm, all, std::span(all).first(1000))->wait());
  const CommStats after = comm.stats();
  const std::size_t expected = 4000 * number(comm.size() - 1);
  expect(after.bytes_sent() - before.bytes_sent() == expected, "sent bytes");
  expect(after.bytes_received() - before.bytes_received() == expected,
         "received bytes");
}

void a_closed_group_gives_its_reason(Comm& comm) {
  if (comm.size() == 1) return;
  expect_ok(barrier(comm)->wait());
  const int other = comm.rank() == 0 ? 1 : 0;
  Bytes never(100);
  auto move = comm.receive(other, Lane::kRequests, never);
  comm.close(Status::error(Code::kInvalid, "enough"));
  const Status under_way = move->wait();
  const Status later = comm.send(other, Lane::kWeights, never)->wait();
  // Another one may have closed before.
  expect(!under_way.ok() && !later.ok(), "no error of a closed group");
  expect(later.text() == "enough", later.text().c_str());
}

}  // namespace

std::vector<CommCase> comm_cases() {
  const auto reason = [](void (*run)(Comm&)) {
    return [run](Comm& comm) -> std::string {
      try {
        run(comm);
        return "";
      } catch (const std::exception& error) {
        return error.what();
      }
    };
  };
#define ZINF_CASE(name) \
  CommCase { #name, reason(name) }
  return {
      ZINF_CASE(messages_arrive_in_order),
      ZINF_CASE(either_end_may_be_first),
      ZINF_CASE(lanes_do_not_wait_for_each_other),
      ZINF_CASE(empty_messages_are_messages),
      ZINF_CASE(random_traffic),
      ZINF_CASE(everybody_gathers_all),
      ZINF_CASE(sums_are_scattered_in_rank_order),
      ZINF_CASE(everybody_has_the_same_sum),
      ZINF_CASE(everybody_has_what_the_root_had),
      ZINF_CASE(nobody_leaves_a_barrier_before_all_have_come),
      ZINF_CASE(many_collectives_are_under_way_at_once),
      ZINF_CASE(bytes_are_counted),
      ZINF_CASE(a_closed_group_gives_its_reason),
  };
#undef ZINF_CASE
}

std::string run_comm_cases(Comm& comm) {
  for (const CommCase& each : comm_cases()) {
    if (std::string why = each.run(comm); !why.empty()) {
      return strf("%s, rank %d of %d: %s", each.name.c_str(), comm.rank(),
                  comm.size(), why.c_str());
    }
  }
  return "";
}

}  // namespace zinf
