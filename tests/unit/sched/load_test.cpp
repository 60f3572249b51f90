#include "src/sched/load.h"

#include <gtest/gtest.h>

#include <random>

namespace zinf::sched {
namespace {

// The same, position by position.
struct SlowLoad {
  std::vector<std::int64_t> bytes;

  std::size_t room(std::size_t position, std::size_t length, std::int64_t most,
                   std::size_t first_step, std::size_t step) const {
    std::size_t room = 0;
    std::size_t at = position + first_step;
    while (room < length && bytes[at % bytes.size()] <= most) {
      ++room;
      at += step;
    }
    return room;
  }
};

TEST(Load, AnswersAsAPlainArrayDoes) {
  std::mt19937 random(7);
  for (std::size_t size = 1; size < 40; ++size) {
    SlowLoad slow{std::vector<std::int64_t>(size, 3)};
    Load load(slow.bytes);
    for (int i = 0; i < 200; ++i) {
      const std::size_t first = random() % size;
      const std::size_t length = random() % (size + 1);
      const std::int64_t bytes = static_cast<int>(random() % 7) - 3;
      load.add(first, length, bytes);
      for (std::size_t j = 0; j < length; ++j)
        slow.bytes[(first + j) % size] += bytes;

      const std::size_t from = random() % size;
      const std::size_t most = random() % (size + 1);
      const std::int64_t limit = static_cast<int>(random() % 12) - 3;
      EXPECT_EQ(load.room_from(from, most, limit),
                slow.room(from, most, limit, 0, 1));
      EXPECT_EQ(load.room_before(from, most, limit),
                slow.room(from, most, limit, size - 1, size - 1));
    }
  }
}

}  // namespace
}  // namespace zinf::sched
