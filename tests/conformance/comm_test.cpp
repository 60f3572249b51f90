// The suite of every group, on groups of threads and on views of them. MPI's
// runs in tests/support/comm_mpi.cpp, torch's in tests/python/test_comm.py.
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "tests/support/comm_suite.h"

namespace zinf {
namespace {

class CommConformance
    : public testing::TestWithParam<std::tuple<int, CommCase>> {
 protected:
  using Ends = std::vector<std::unique_ptr<Comm>>;

  static void run(const CommCase& which, const Ends& ends) {
    std::vector<std::string> failures(ends.size());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      threads.emplace_back(
          [&, rank] { failures[rank] = which.run(*ends[rank]); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& failure : failures) EXPECT_EQ(failure, "");
  }
};

TEST_P(CommConformance, Holds) {
  const auto& [size, which] = GetParam();
  run(which, make_thread_group(size));
}

// The others of the group in the opposite order.
TEST_P(CommConformance, HoldsInAView) {
  const auto& [size, which] = GetParam();
  Ends group = make_thread_group(2 * size);
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(2 * (size - rank) - 1);
  Ends views;
  for (int rank : ranks) {
    views.push_back(
        make_view(std::move(group[static_cast<std::size_t>(rank)]), ranks));
    EXPECT_EQ(views.back()->number(0), 2 * size - 1);
    EXPECT_EQ(views.back()->total(), 2 * size);
  }
  run(which, views);
}

INSTANTIATE_TEST_SUITE_P(Threads, CommConformance,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::ValuesIn(comm_cases())),
                         [](const auto& each) {
                           return std::get<1>(each.param).name + "_" +
                                  std::to_string(std::get<0>(each.param));
                         });

}  // namespace
}  // namespace zinf
