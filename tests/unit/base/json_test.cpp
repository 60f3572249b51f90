#include "src/base/json.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace zinf {
namespace {

TEST(Json, WritesMembersInTheirOrder) {
  JsonObject inner;
  inner.add("x", 1.5);
  JsonObject object;
  object.add("a", "b\"c\n")
      .add("yes", true)
      .add("n", -3)
      .add("u", ~std::uint64_t{0});
  object.add("none", std::optional<double>()).add("nan", std::nan(""));
  object.add("list", std::vector<JsonObject>{inner, inner});
  EXPECT_EQ(object.text(),
            R"({"a": "b\"c\u000a", "yes": true, "n": -3, )"
            R"("u": 18446744073709551615, "none": null, "nan": null, )"
            R"("list": [{"x": 1.5}, {"x": 1.5}]})");
}

TEST(Json, GivesNumbersInFull) {
  for (double number : {1763273412.1234567, 0.1, 1e300, -5e-324}) {
    std::string json = JsonObject().add("x", number).text();
    EXPECT_EQ(nlohmann::json::parse(json)["x"].get<double>(), number) << json;
  }
  EXPECT_EQ(JsonObject().add("x", 0.1).text(), R"({"x": 0.1})");
  EXPECT_EQ(JsonObject().add("x", std::vector<double>{0.1, 2}).text(),
            R"({"x": [0.1, 2]})");
}

TEST(Json, ReplacesWhatIsNotUtf8) {
  EXPECT_EQ(json_quoted("a\xff"
                        "b\xc3"),
            R"("a\ufffdb\ufffd")");
  EXPECT_EQ(json_quoted("\xc3\xa9"), "\"\xc3\xa9\"");
  // A surrogate, a form too long, a character beyond the last.
  for (const char* bad : {"\xed\xa7\xb9", "\xe0\x80\x80", "\xf4\x90\x80\x80"}) {
    EXPECT_EQ(json_quoted(bad).substr(0, 7), "\"\\ufffd") << bad;
  }
}

RC_GTEST_PROP(Json, AnyTextIsReadByALibrary, (const std::string& text)) {
  std::string json = JsonObject().add("key", text).text();
  RC_ASSERT(nlohmann::json::accept(json));
}

}  // namespace
}  // namespace zinf
