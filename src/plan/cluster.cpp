#include "zinf/cluster.h"

#include <array>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "src/base/strf.h"
#include "src/base/suggest.h"
#include "src/plan/constants.h"
#include "zinf/bytes.h"

namespace zinf::plan {
namespace {

constexpr double kMostNodes = 1e7;
constexpr double kMostBytes = 1e21;

// Rates of built-in machines other than the paper's are from their makers'
// sheets, less what protocols take: of memory 75 to 80 % and of NVLink 85 %,
// PCIe 4.0 and 5.0 x16 (31.5 and 63 GB/s) 25 and 50 GB/s, drives of the fourth
// generation 6.5 GB/s for reads and 4 for writes (3.84 TB; a choice, sheets
// differ), links between nodes 70 % of their sum, as the DGX-2's 70 of 100.
// Peaks are dense, in bf16 (V100: fp16), and in fp32 without TF32, which torch
// does not use for matrix products unless it is told to.
Cluster dgx2_v100() {
  return {.name = "dgx2-v100",
          .devices_per_node = 16,
          .device_bytes = 32 * kGiB,
          .host_bytes = 1.5 * kTiB,
          .nvme_bytes = 8 * 3.84e12,
          .peak_flops = 125e12,
          .fp32_peak_flops = 15.7e12,
          .achieved = kAchieved,
          .device_memory_rate = kV100Memory,
          .host_memory_rate = kDgx2HostMemory,
          .link_rate = kV100Link,
          .devices_per_uplink = kV100sPerUplink,
          .nvme_read_rate = kDgx2Nvme,
          .nvme_write_rate = kDgx2Nvme,
          .device_network_rate = kV100Nvlink,
          .node_network_rate = kDgx2Network,
          .drives = 8};
}

// NVIDIA DGX A100 (80 GB) data sheet and system architecture white paper: two
// EPYC 7742 with 16 channels of DDR4-3200 (410 GB/s), two devices below a PCIe
// 4.0 switch, NVLink of 600 GB/s both ways, eight ConnectX-6 of 200 Gb/s for
// compute, eight U.2 drives of 3.84 TB. NVIDIA A100 80GB SXM data sheet: 2039
// GB/s, 312 TFLOPS.
Cluster dgx_a100() {
  return {.name = "dgx-a100",
          .devices_per_node = 8,
          .device_bytes = 80 * kGiB,
          .host_bytes = 2 * kTiB,
          .nvme_bytes = 8 * 3.84e12,
          .peak_flops = 312e12,
          .fp32_peak_flops = 19.5e12,
          .achieved = kAchieved,
          .device_memory_rate = 1.6e12,
          .host_memory_rate = 300e9,
          .link_rate = 25e9,
          .devices_per_uplink = 2,
          .nvme_read_rate = 8 * 6.5e9,
          .nvme_write_rate = 8 * 4e9,
          .device_network_rate = 250e9,
          .node_network_rate = 0.7 * 200e9,
          .drives = 8};
}

// NVIDIA DGX H100 data sheet: two Xeon 8480C with 16 channels of DDR5-4800 (614
// GB/s), NVLink of 900 GB/s both ways, eight ConnectX-7 of 400 Gb/s, eight U.2
// drives of 3.84 TB. Each device has a PCIe 5.0 x16 of its own: NVIDIA's MLPerf
// systems name 504 GB/s for eight. H100 SXM data sheet: 3.35 TB/s, 989 TFLOPS.
Cluster dgx_h100() {
  return {.name = "dgx-h100",
          .devices_per_node = 8,
          .device_bytes = 80 * kGiB,
          .host_bytes = 2 * kTiB,
          .nvme_bytes = 8 * 3.84e12,
          .peak_flops = 989e12,
          .fp32_peak_flops = 67e12,
          .achieved = kAchieved,
          .device_memory_rate = 2.7e12,
          .host_memory_rate = 450e9,
          .link_rate = 50e9,
          .devices_per_uplink = 1,
          .nvme_read_rate = 8 * 6.5e9,
          .nvme_write_rate = 8 * 4e9,
          .device_network_rate = 380e9,
          .node_network_rate = 0.7 * 400e9,
          .drives = 8};
}

// NVIDIA GH200 Grace Hopper Superchip data sheet: HBM3 of 4 TB/s, NVLink-C2C of
// 900 GB/s both ways. Memory of 480 GB is clocked lower than that of 120 GB:
// 384 GB/s, not 512 (Grace CPU data sheet), which is also the most that the
// link can be given. One ConnectX-7 of 400 Gb/s.
Cluster gh200() {
  return {.name = "gh200",
          .devices_per_node = 1,
          .device_bytes = 96 * kGiB,
          .host_bytes = 480 * kGiB,
          .nvme_bytes = 2 * 3.84e12,
          .peak_flops = 989e12,
          .fp32_peak_flops = 67e12,
          .achieved = kAchieved,
          .device_memory_rate = 3.2e12,
          .host_memory_rate = 0.8 * 384e9,
          .link_rate = 0.8 * 384e9,
          .devices_per_uplink = 1,
          .nvme_read_rate = 2 * 6.5e9,
          .nvme_write_rate = 2 * 4e9,
          .device_network_rate = 0.7 * 50e9,
          .node_network_rate = 0.7 * 50e9,
          .drives = 2};
}

// NVIDIA Ada GPU architecture white paper: 1008 GB/s, 165 TFLOPS with sums in
// fp32, PCIe 4.0 x16. The rest is a choice: two channels of DDR5-5200 (83
// GB/s), a drive of the fourth generation, Ethernet of 10 Gb/s.
Cluster rtx4090_workstation() {
  return {.name = "rtx4090-workstation",
          .devices_per_node = 1,
          .device_bytes = 24 * kGiB,
          .host_bytes = 128 * kGiB,
          .nvme_bytes = 4e12,
          .peak_flops = 165e12,
          .fp32_peak_flops = 82.6e12,
          .achieved = kAchieved,
          .device_memory_rate = 0.8e12,
          .host_memory_rate = 60e9,
          .link_rate = 25e9,
          .devices_per_uplink = 1,
          .nvme_read_rate = 6.5e9,
          .nvme_write_rate = 4e9,
          .device_network_rate = 25e9,
          .node_network_rate = 0.7 * 1.25e9,
          .drives = 1};
}

constexpr std::array kBuiltIn = {&dgx2_v100, &dgx_a100, &dgx_h100, &gh200,
                                 &rtx4090_workstation};

struct NumberMember {
  const char* name;
  double Cluster::* value;
};
constexpr std::array<NumberMember, 16> kNumbers = {{
    {"device_bytes", &Cluster::device_bytes},
    {"host_bytes", &Cluster::host_bytes},
    {"nvme_bytes", &Cluster::nvme_bytes},
    {"peak_flops", &Cluster::peak_flops},
    {"fp32_peak_flops", &Cluster::fp32_peak_flops},
    {"achieved", &Cluster::achieved},
    {"device_memory_rate", &Cluster::device_memory_rate},
    {"host_memory_rate", &Cluster::host_memory_rate},
    {"link_rate", &Cluster::link_rate},
    {"nvme_read_rate", &Cluster::nvme_read_rate},
    {"nvme_write_rate", &Cluster::nvme_write_rate},
    {"nvme_rate", &Cluster::nvme_rate},
    {"nvme_drag", &Cluster::nvme_drag},
    {"device_network_rate", &Cluster::device_network_rate},
    {"node_network_rate", &Cluster::node_network_rate},
    {"price_per_hour", &Cluster::price_per_hour},
}};

struct CountMember {
  const char* name;
  std::uint64_t Cluster::* value;
};
constexpr std::array<CountMember, 4> kCounts = {{
    {"nodes", &Cluster::nodes},
    {"devices_per_node", &Cluster::devices_per_node},
    {"devices_per_uplink", &Cluster::devices_per_uplink},
    {"drives", &Cluster::drives},
}};

Status invalid(std::string text) {
  return Status::error(Code::kInvalid, "cluster: " + std::move(text));
}

Status unknown_member(const std::string& name) {
  std::vector<std::string> known = {"name", "like", "on_host"};
  for (const NumberMember& one : kNumbers) known.emplace_back(one.name);
  for (const CountMember& one : kCounts) known.emplace_back(one.name);
  const std::string near = nearest_name(name, known);
  return invalid(strf(
      "unknown member \"%s\"%s", name.c_str(),
      near.empty() ? "" : strf(": did you mean %s?", near.c_str()).c_str()));
}

Result<double> number(const std::string& name, const nlohmann::json& value) {
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) {
    std::string text = value.get<std::string>();
    if (text.ends_with("/s")) text.resize(text.size() - 2);
    const Result<std::uint64_t> bytes = parse_bytes(text);
    if (!bytes.ok()) return bytes.status().in("cluster: " + name);
    return static_cast<double>(bytes.value());
  }
  return invalid(name + " must be a number, or a text such as \"80GiB\"");
}

Status set_member(Cluster& cluster, const std::string& name,
                  const nlohmann::json& value) {
  for (const NumberMember& one : kNumbers) {
    if (name != one.name) continue;
    ZINF_ASSIGN(cluster.*one.value, number(name, value));
    return {};
  }
  for (const CountMember& one : kCounts) {
    if (name != one.name) continue;
    if (!value.is_number_unsigned())
      return invalid(name + " must be a whole number");
    cluster.*one.value = value.get<std::uint64_t>();
    return {};
  }
  if (name == "name" && value.is_string()) {
    cluster.name = value.get<std::string>();
    return {};
  }
  if (name == "on_host" && value.is_boolean()) {
    cluster.on_host = value.get<bool>();
    return {};
  }
  if (name == "name" || name == "on_host")
    return invalid(name + " has the wrong type");
  return unknown_member(name);
}

}  // namespace

std::vector<std::string> cluster_names() {
  std::vector<std::string> names;
  names.reserve(kBuiltIn.size());
  for (const auto& make : kBuiltIn) names.push_back(make().name);
  return names;
}

Result<Cluster> built_in_cluster(std::string_view name) {
  for (const auto& make : kBuiltIn) {
    Cluster cluster = make();
    if (cluster.name == name) return cluster;
  }
  std::string hint = name_hint(name, cluster_names());
  if (!hint.ends_with('?')) hint += ", or the path of a JSON file";
  return Status::error(Code::kInvalid,
                       strf("unknown cluster \"%.*s\": %s", len(name),
                            name.data(), hint.c_str()));
}

Result<Cluster> parse_cluster(std::string_view json) {
  const auto parsed =
      nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return invalid("not a JSON object");
  Cluster cluster;
  if (parsed.contains("like")) {
    if (!parsed["like"].is_string()) return invalid("like must be a name");
    ZINF_ASSIGN(cluster, built_in_cluster(parsed["like"].get<std::string>()));
  }
  for (const auto& [name, value] : parsed.items()) {
    if (name != "like") ZINF_TRY(set_member(cluster, name, value));
  }
  ZINF_TRY(check(cluster));
  return cluster;
}

Result<Cluster> load_cluster(const std::string& name_or_path) {
  Result<Cluster> built_in = built_in_cluster(name_or_path);
  if (built_in.ok()) return built_in;
  const bool is_path = name_or_path.find('/') != std::string::npos ||
                       name_or_path.ends_with(".json");
  if (!is_path) return built_in;
  errno = 0;
  std::ifstream file(name_or_path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file.is_open() || file.bad())
    return Status::system("read", name_or_path, errno != 0 ? errno : EIO);
  Result<Cluster> cluster = parse_cluster(text.str());
  if (!cluster.ok()) return cluster.status().in(name_or_path);
  return cluster;
}

Status check(const Cluster& cluster) {
  std::string problems;
  const auto refuse = [&](const std::string& text) {
    problems += (problems.empty() ? "" : ", ") + text;
  };
  for (const CountMember& one : kCounts) {
    const std::uint64_t value = cluster.*one.value;
    if (value == 0 || double(value) > kMostNodes)
      refuse(strf("%s must be from 1 to 10^7", one.name));
  }
  for (const NumberMember& one : kNumbers) {
    const double value = cluster.*one.value;
    if (!(value >= 0 && value <= kMostBytes))
      refuse(strf("%s must be from 0 to 10^21", one.name));
  }
  const auto need = [&](double value, const char* name) {
    if (!(value > 0)) refuse(strf("%s must be positive", name));
  };
  need(cluster.peak_flops, "peak_flops");
  need(cluster.host_bytes, "host_bytes");
  need(cluster.host_memory_rate, "host_memory_rate");
  if (!cluster.on_host) {
    need(cluster.device_bytes, "device_bytes");
    need(cluster.device_memory_rate, "device_memory_rate");
    need(cluster.link_rate, "link_rate");
  }
  if (cluster.nvme_bytes > 0) {
    need(cluster.nvme_read_rate, "nvme_read_rate");
    need(cluster.nvme_write_rate, "nvme_write_rate");
  }
  if (cluster.devices_per_node > 1)
    need(cluster.device_network_rate, "device_network_rate");
  if (cluster.nodes > 1)
    need(cluster.node_network_rate, "node_network_rate (--network-rate)");
  if (!(cluster.achieved > 0 && cluster.achieved <= 1))
    refuse("achieved must be above 0 and at most 1");
  if (problems.empty()) return {};
  return invalid(problems);
}

}  // namespace zinf::plan
