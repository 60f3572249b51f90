// The suite of every group, on groups of threads. MPI's runs in
// tests/support/comm_mpi.cpp, torch's in tests/python/test_comm.py.
#include <gtest/gtest.h>

#include <thread>

#include "tests/support/comm_suite.h"

namespace zinf {
namespace {

class CommConformance
    : public testing::TestWithParam<std::tuple<int, CommCase>> {};

TEST_P(CommConformance, Holds) {
  const auto& [size, which] = GetParam();
  auto ends = make_thread_group(size);
  std::vector<std::string> failures(ends.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    threads.emplace_back(
        [&, rank] { failures[rank] = which.run(*ends[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) EXPECT_EQ(failure, "");
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
