#include "adapters/emulated/memory.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/support/ok.h"

namespace zinf::emulated {
namespace {

TEST(DeviceMemory, GivesABlockToNobodyBeforeItIsReclaimed) {
  auto memory = ok(DeviceMemory::create(4096));
  void* block = memory->allocate(4096);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(memory->use().used_bytes, 4096u);
  memory->release(block);
  EXPECT_EQ(memory->use().used_bytes, 0u);
  EXPECT_EQ(memory->allocate(64), nullptr);
  memory->reclaim(block);
  EXPECT_EQ(memory->allocate(4096), block);
}

TEST(DeviceMemory, PoisonsWhatIsReclaimed) {
  auto memory = ok(DeviceMemory::create(4096));
  void* block = memory->allocate(64);
  auto* bytes = static_cast<unsigned char*>(memory->kernel_address(block));
  std::memset(bytes, 1, 64);
  memory->release(block);
  EXPECT_EQ(bytes[0], 1);
  memory->reclaim(block);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(bytes[i], 0xFF);
}

TEST(DeviceMemory, JoinsNeighboursThatAreReclaimed) {
  auto memory = ok(DeviceMemory::create(4096));
  void* first = memory->allocate(1024);
  void* second = memory->allocate(1024);
  void* third = memory->allocate(2048);
  for (void* block : {first, third, second}) {
    memory->release(block);
    memory->reclaim(block);
  }
  EXPECT_EQ(memory->use().largest_free_bytes, 4096u);
}

}  // namespace
}  // namespace zinf::emulated
