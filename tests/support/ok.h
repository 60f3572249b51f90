// The value of a Result that must be one.
#pragma once

#include <gtest/gtest.h>

#include <utility>

#include "zinf/status.h"

namespace zinf {

template <typename T>
T ok(Result<T> result) {
  EXPECT_TRUE(result.ok()) << result.status().text();
  return std::move(result).value();
}

}  // namespace zinf
