#include "zinf/beyond.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/support/ok.h"

namespace zinf::plan {
namespace {

TEST(Beyond, EveryTableHasItsRows) {
  for (const TextTable& table : ok(beyond_tables())) {
    EXPECT_FALSE(table.rows.empty()) << table.title;
    for (const auto& row : table.rows)
      EXPECT_EQ(row.size(), table.header.size()) << table.title;
  }
}

TEST(Beyond, APairIsNoSlowerThanEitherAlone) {
  const TextTable table = ok(interactions());
  const auto value = [&](std::size_t row, std::size_t column) {
    return std::strtod(table.rows[row][column + 1].c_str(), nullptr);
  };
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    EXPECT_GE(value(i, i), 0.99) << table.rows[i][0];
    for (std::size_t j = 0; j < table.rows.size(); ++j) {
      EXPECT_EQ(value(i, j), value(j, i)) << table.rows[i][0];
      EXPECT_GE(value(i, j), 0.99 * value(i, i))
          << table.rows[i][0] << " and " << table.rows[j][0];
    }
  }
}

TEST(Beyond, TwentyTrillionAreQuickerWithALargerBatchOnNvme) {
  const TextTable table = ok(beyond_tables())[0];
  const auto teraflops = [&](std::size_t row) {
    return std::strtod(table.rows[row][5].c_str(), nullptr);
  };
  EXPECT_GT(teraflops(table.rows.size() - 1), teraflops(0));
}

}  // namespace
}  // namespace zinf::plan
