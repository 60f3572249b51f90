#include "zinf/status.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>

#include "src/base/check.h"

namespace zinf {
namespace {

TEST(Status, OkCarriesNothing) {
  Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), Code::kOk);
  EXPECT_EQ(status.text(), "ok");
  EXPECT_TRUE(status.in("anything").ok());
}

TEST(Status, SystemErrorNamesOperationObjectAndErrno) {
  Status status = Status::system("open", "/data/x", ENOSPC);
  EXPECT_EQ(status.code(), Code::kNoSpace);
  EXPECT_EQ(status.errnum(), ENOSPC);
  EXPECT_EQ(status.text(),
            "open /data/x: No space left on device (errno 28 ENOSPC)");
}

TEST(Status, TransferNamesOffsetWantedAndGot) {
  Transfer transfer{.operation = "read",
                    .path = "/data/x",
                    .offset = 4096,
                    .wanted = 8192,
                    .got = 512};
  EXPECT_EQ(transfer.failed().text(),
            "read /data/x at offset 4096: wanted 8192 bytes, got 512: end of "
            "file");
  transfer.errnum = EIO;
  EXPECT_EQ(transfer.failed().code(), Code::kIo);
  EXPECT_NE(transfer.failed().text().find("errno 5 EIO"), std::string::npos);
}

TEST(Status, ContextIsPutBeforeTheText) {
  Status status = Status::error(Code::kCorrupt, "bad magic").in("store");
  EXPECT_EQ(status.text(), "store: bad magic");
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_EQ(status.in("store").text(), "store: bad magic");  // is told once
  EXPECT_EQ(status.in("sto").text(), "sto: store: bad magic");
}

TEST(Status, UnknownErrnoStillGivesText) {
  EXPECT_NE(Status::system("read", "x", 4711).text().find("errno 4711"),
            std::string::npos);
}

Result<int> half(int value) {
  if (value % 2 != 0) return Status::error(Code::kInvalid, "odd");
  return value / 2;
}

Result<int> quarter(int value) {
  ZINF_ASSIGN(int halved, half(value));
  ZINF_ASSIGN(int result, half(halved));
  return result;
}

TEST(Result, PropagatesValueOrStatus) {
  EXPECT_EQ(quarter(8).value(), 2);
  EXPECT_EQ(quarter(6).status().text(), "odd");
}

TEST(Result, HoldsMoveOnlyValues) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(3);
  std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 3);
}

TEST(ResultDeathTest, ValueOfAnErrorEndsWithItsText) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(quarter(3).value(), "check failed.*odd");
}

TEST(CheckDeathTest, NamesPlaceConditionAndMessage) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(ZINF_CHECK(1 + 1 == 3, "sum %d", 2),
               "status_test.cpp.*1 \\+ 1 == 3: sum 2");
}

}  // namespace
}  // namespace zinf
