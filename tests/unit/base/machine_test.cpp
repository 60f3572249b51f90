#include "zinf/machine.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temp_dir.h"

namespace zinf {
namespace {

class MachineTest : public testing::Test {
 protected:
  void put(const std::string& path, const std::string& text) {
    std::filesystem::path full = dir_.path() + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  Machine inspect() {
    put("/proc/meminfo", "MemTotal: 1000 kB\nMemAvailable:  600 kB\n");
    put("/proc/cpuinfo", "model name\t: Some CPU\nflags\t: fpu avx2 fma x\n");
    put("/sys/kernel/mm/transparent_hugepage/enabled",
        "always [madvise] never\n");
    return inspect_machine(dir_.path());
  }
  TempDir dir_;
};

TEST_F(MachineTest, ReadsCpuMemoryAndHugePages) {
  Machine machine = inspect();
  EXPECT_EQ(machine.cpu, "Some CPU");
  EXPECT_EQ(machine.isa, (std::vector<std::string>{"avx2", "fma"}));
  EXPECT_EQ(machine.memory_bytes, 1000u * 1024);
  EXPECT_EQ(machine.available_bytes, 600u * 1024);
  EXPECT_EQ(machine.huge_pages, "madvise");
  EXPECT_FALSE(machine.cgroup_limit_bytes.has_value());
  EXPECT_GE(machine.cores, 1);
}

TEST_F(MachineTest, TakesTheTightestLimitOfAV2Hierarchy) {
  put("/proc/self/cgroup", "0::/outer/inner\n");
  put("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
  put("/sys/fs/cgroup/outer/memory.max", "500000\n");
  EXPECT_EQ(inspect().cgroup_limit_bytes, 500000u);
}

TEST_F(MachineTest, TakesTheTightestLimitOfAV1Hierarchy) {
  put("/proc/self/cgroup", "5:cpu,memory:/job\n0::/\n");
  put("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "400000\n");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(inspect().cgroup_limit_bytes, 400000u);
}

TEST_F(MachineTest, WhatIsAvailableIsWhatTheTightestGroupHasLeft) {
  put("/proc/self/cgroup", "0::/outer/inner\n");
  put("/sys/fs/cgroup/outer/inner/memory.max", "500000\n");
  put("/sys/fs/cgroup/outer/inner/memory.current", "100000\n");
  put("/sys/fs/cgroup/outer/memory.max", "550000\n");
  put("/sys/fs/cgroup/outer/memory.current", "300000\n");
  put("/sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file 50000\n");
  (void)inspect();
  EXPECT_EQ(available_memory(dir_.path()), 300000u);
}

TEST_F(MachineTest, WithoutGroupsTheMachineItselfTellsWhatIsAvailable) {
  (void)inspect();
  EXPECT_EQ(available_memory(dir_.path()), 600u * 1024);
}

TEST_F(MachineTest, ThisMachineIsPlausible) {
  Machine machine = inspect_machine();
  EXPECT_GT(machine.memory_bytes, 1u << 28);
  EXPECT_GT(machine.available_bytes, 0u);
  EXPECT_FALSE(machine.kernel.empty());
}

}  // namespace
}  // namespace zinf
