// The machines of a run: what they hold and how fast they move it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zinf/status.h"

namespace zinf::plan {

// All nodes are alike. Rates are bytes per second in one direction, while all
// devices of a node are busy.
struct Cluster {
  std::string name = {};
  std::uint64_t nodes = 1;
  std::uint64_t devices_per_node = 1;

  // Capacities: of one device, and of one node.
  double device_bytes = 0;
  double host_bytes = 0;
  double nvme_bytes = 0;  // 0: none
  // Devices that compute in the host's memory (CPUs): no link, and device_bytes
  // does not count.
  bool on_host = false;

  double peak_flops = 0;  // of a device, dense, in the precision of training
  double fp32_peak_flops = 0;  // the same in fp32; 0: as peak_flops
  double achieved = 0.40;      // share of it that a whole model's step reaches
  double device_memory_rate = 0;
  double host_memory_rate = 0;  // of a node
  // Between a device and its host: so many devices share an uplink.
  double link_rate = 0;
  std::uint64_t devices_per_uplink = 1;
  double nvme_read_rate = 0;  // of a node
  double nvme_write_rate = 0;
  double nvme_rate = 0;  // both ways at once, together; 0: their sum
  // Seconds of compute that a byte to or from NVMe takes from a device on the
  // host's cores: it is moved by these, and through the same memory.
  double nvme_drag = 0;
  double device_network_rate = 0;  // of a device, inside a node
  double node_network_rate = 0;    // of a node, to the others

  std::uint64_t drives = 1;   // of a node
  double price_per_hour = 0;  // of a device; 0: unknown

  std::uint64_t devices() const { return nodes * devices_per_node; }
};

// "dgx2-v100", ...
std::vector<std::string> cluster_names();

// A built-in one, with one node. kInvalid for another name, with the nearest.
Result<Cluster> built_in_cluster(std::string_view name);

// Members are those of Cluster; sizes and rates are numbers, or texts such as
// "80GiB". "like" names a built-in one that gives what is not there. kInvalid
// for members that are not known (with the nearest) or have no sense.
Result<Cluster> parse_cluster(std::string_view json);
// A built-in name, or the path of a JSON file.
Result<Cluster> load_cluster(const std::string& name_or_path);

// kInvalid with every problem in one text.
Status check(const Cluster& cluster);

}  // namespace zinf::plan
