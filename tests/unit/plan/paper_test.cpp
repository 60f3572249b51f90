// The papers' tables against ours, with the tolerances that were promised.
#include "zinf/paper.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/ok.h"

namespace zinf::plan {
namespace {

std::string name(const PaperTable& table, const PaperCell& cell) {
  return table.id + ", " + cell.row + ", " + cell.column;
}

PaperTable find(const std::string& id) {
  for (PaperTable& table : ok(paper_tables()))
    if (table.id == id) return table;
  ADD_FAILURE() << id;
  return {};
}

TEST(Paper, ZerosTableOneIsRightToItsLastDigit) {
  const PaperTable table = find("ZeRO table 1");
  EXPECT_EQ(table.cells.size(), 54u);
  for (const PaperCell& cell : table.cells) {
    EXPECT_LE(std::abs(cell.ours - cell.paper()), cell.last_digit())
        << name(table, cell);
  }
}

TEST(Paper, ZerosSavingsHaveTheirLimits) {
  const double all = zero_bytes(1, 1e9, 0);
  EXPECT_NEAR(all / zero_bytes(1, 1e9, 1), 4, 1e-6);
  EXPECT_NEAR(all / zero_bytes(1, 1e9, 2), 8, 1e-6);
  EXPECT_NEAR(all / zero_bytes(1, 64, 3), 64, 1e-9);
}

TEST(Paper, FormulasAreWithinTheirTolerance) {
  for (const PaperTable& table : ok(paper_tables())) {
    if (table.simulated || table.tolerance == 0) continue;
    for (const PaperCell& cell : table.cells) {
      if (cell.paper_errs) {
        EXPECT_FALSE(cell.note.empty()) << name(table, cell);
        continue;
      }
      // What is printed with two digits is no better than they are.
      const double digit = cell.last_digit() / 2 / cell.paper();
      EXPECT_LE(cell.error(), std::max(table.tolerance, 1.001 * digit))
          << name(table, cell) << ": " << cell.ours;
    }
  }
}

TEST(Paper, SimulatedFiguresAreWithinTheirMean) {
  for (const PaperTable& table : ok(paper_tables())) {
    if (!table.simulated) continue;
    EXPECT_LE(table.mean_error(), table.tolerance) << table.id;
    for (const PaperCell& cell : table.cells) {
      if (cell.error() > 0.15) {
        EXPECT_FALSE(cell.note.empty()) << name(table, cell) << ": "
                                        << cell.ours << " for " << cell.printed;
      }
    }
  }
}

TEST(Paper, NeededRatesAreThoseOfSectionFour) {
  constexpr double kFlops = 70e12;
  const auto weights = [](double batch, double wanted) {
    return needed_rate(weight_intensity(batch, 1024), wanted, kFlops) / 1e9;
  };
  const auto states = [](double batch, double wanted) {
    return needed_rate(state_intensity(batch, 1024), wanted, kFlops) / 1e9;
  };
  EXPECT_NEAR(weights(1, 0.5), 68, 0.5);
  EXPECT_NEAR(weights(1, 0.8), 273, 0.5);
  EXPECT_NEAR(weights(1, 0.9), 615, 0.5);
  EXPECT_NEAR(weights(16, 0.9), 38, 0.5);
  EXPECT_NEAR(states(1, 0.9), 2461, 0.5);
  EXPECT_NEAR(states(2, 0.9), 1230, 0.5);
  EXPECT_NEAR(states(8, 0.5), 34, 0.5);
  const auto activations = [](double hidden_k, double wanted) {
    return needed_rate(activation_intensity(1024 * hidden_k), wanted, kFlops) /
           1e9;
  };
  EXPECT_NEAR(activations(2, 0.5), 1.42, 0.005);
  EXPECT_NEAR(activations(8, 0.9), 3.2, 0.05);
  EXPECT_NEAR(activations(64, 0.8), 0.18, 0.005);
  EXPECT_NEAR(efficiency(activation_intensity(16384), 3e9, kFlops), 0.944,
              0.0005);
}

TEST(Paper, ScalingIsSuperlinear) {
  const PaperTable table = find("figure 5b");
  EXPECT_GT(table.cells.back().ours, 8 * table.cells.front().ours);
}

}  // namespace
}  // namespace zinf::plan
