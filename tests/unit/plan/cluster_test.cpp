#include "zinf/cluster.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

namespace zinf::plan {
namespace {

std::string refusal(std::string_view json) {
  const Result<Cluster> cluster = parse_cluster(json);
  EXPECT_FALSE(cluster.ok()) << json;
  EXPECT_EQ(cluster.status().code(), Code::kInvalid);
  return cluster.ok() ? "" : cluster.status().text();
}

TEST(Cluster, EveryBuiltInOneMakesSense) {
  for (const std::string& name : cluster_names()) {
    const Cluster cluster = ok(built_in_cluster(name));
    EXPECT_TRUE(check(cluster).ok()) << check(cluster).text();
    EXPECT_EQ(cluster.name, name);
  }
}

TEST(Cluster, ADgx2HasWhatThePaperSays) {
  const Cluster node = ok(built_in_cluster("dgx2-v100"));
  EXPECT_EQ(node.devices(), 16u);
  EXPECT_NEAR(node.nvme_bytes / 0x1p40, 28, 0.1);
  EXPECT_DOUBLE_EQ(node.nvme_read_rate / 16, 1.6e9);
  EXPECT_DOUBLE_EQ(node.link_rate / double(node.devices_per_uplink), 3e9);
}

TEST(Cluster, AnUnknownNameIsToldWithTheNearest) {
  EXPECT_EQ(built_in_cluster("dgx-a10").status().text(),
            "unknown cluster \"dgx-a10\": did you mean dgx-a100?");
  EXPECT_NE(built_in_cluster("elephant").status().text().find("known are"),
            std::string::npos);
}

TEST(Cluster, JsonChangesABuiltInOne) {
  const Cluster cluster = ok(parse_cluster(
      R"({"like": "dgx-a100", "name": "ours", "nodes": 4,
          "device_bytes": "40GiB", "link_rate": "20GB/s"})"));
  EXPECT_EQ(cluster.name, "ours");
  EXPECT_EQ(cluster.devices(), 32u);
  EXPECT_DOUBLE_EQ(cluster.device_bytes, 40 * 0x1p30);
  EXPECT_DOUBLE_EQ(cluster.link_rate, 20e9);
  EXPECT_DOUBLE_EQ(cluster.peak_flops, 312e12);
}

TEST(Cluster, BadJsonIsTold) {
  EXPECT_NE(refusal("[]").find("not a JSON object"), std::string::npos);
  EXPECT_NE(refusal(R"({"like": "gh200", "device_byts": 1})")
                .find("did you mean device_bytes?"),
            std::string::npos);
  EXPECT_NE(
      refusal(R"({"like": "gh200", "nodes": 0})").find("nodes must be from 1"),
      std::string::npos);
  EXPECT_NE(refusal(R"({"like": "gh200", "nodes": -3})")
                .find("must be a whole number"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"like": "gh200", "host_bytes": "4G"})")
                .find("\"4GB\" (decimal)"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"like": "gh200", "host_bytes": 1e300})")
                .find("host_bytes must be from 0 to 10^21"),
            std::string::npos);
  EXPECT_NE(
      refusal(R"({"like": "gh200", "achieved": 1.5})").find("achieved must be"),
      std::string::npos);
  EXPECT_NE(refusal(R"({"like": "gh2000"})").find("did you mean gh200?"),
            std::string::npos);
  EXPECT_NE(refusal("{}").find("peak_flops must be positive"),
            std::string::npos);
}

TEST(Cluster, AFileIsRead) {
  const TempDir folder;
  const std::string path = folder.path() + "/c.json";
  std::ofstream(path) << R"({"like": "gh200", "nodes": 2})";
  EXPECT_EQ(ok(load_cluster(path)).nodes, 2u);
  EXPECT_EQ(load_cluster(folder.path() + "/none.json").status().code(),
            Code::kNotFound);
}

}  // namespace
}  // namespace zinf::plan
