#include "src/base/suggest.h"

#include <gtest/gtest.h>

#include <vector>

namespace zinf {
namespace {

TEST(Suggest, FindsTheNearestKnownName) {
  std::vector<std::string> known = {"--block", "--depth", "--backend"};
  EXPECT_EQ(nearest_name("--blok", known), "--block");
  EXPECT_EQ(nearest_name("--bakcend", known), "--backend");
  EXPECT_EQ(nearest_name("--depth", known), "--depth");
  EXPECT_EQ(nearest_name("back", known), "--backend");
}

TEST(Suggest, ANameThatOnlyMissesItsEndIsNotDisplacedByAFartherOne) {
  std::vector<std::string> known = {"dgx-a100", "dgx-h100"};
  EXPECT_EQ(nearest_name("dgx-a10", known), "dgx-a100");
}

TEST(Suggest, SaysNothingWhenNothingIsNear) {
  std::vector<std::string> known = {"bench", "tune"};
  EXPECT_EQ(nearest_name("elephants", known), "");
  EXPECT_EQ(nearest_name("x", {}), "");
}

}  // namespace
}  // namespace zinf
