#include "src/plan/helps.h"

#include <cmath>
#include <functional>
#include <utility>

#include "src/base/strf.h"
#include "zinf/bytes.h"

namespace zinf::plan {
namespace {

constexpr double kMostNodes = 65536;

class Search {
 public:
  explicit Search(const Request& request) : request_(request) {}

  std::vector<std::string> run() {
    settings();
    batch();
    machines();
    return std::move(found_);
  }

 private:
  using Change = std::function<void(Request&)>;

  bool try_change(const std::string& text, const Change& change) {
    Request changed = request_;
    change(changed);
    if (!check(changed).ok() || !would_fit(changed)) return false;
    found_.push_back(text);
    return true;
  }

  // Cost nothing but time.
  void settings() {
    if (!request_.recompute) {
      try_change("recompute activations",
                 [](Request& r) { r.recompute = true; });
    }
    if (request_.precision == "bf16") {
      try_change("split masters (precision bf16-split)",
                 [](Request& r) { r.precision = "bf16-split"; });
    }
    for (std::uint64_t tiles = 2; tiles <= 64; tiles *= 2) {
      const auto text = strf("operators in %d tiles (--tiles %d)",
                             static_cast<int>(tiles), static_cast<int>(tiles));
      if (try_change(text, [&](Request& r) { r.tiles = tiles; })) break;
    }
    if (request_.micro_batches > 0) {
      try_change("more micro-batches (leave --micro-batches out)",
                 [](Request& r) { r.micro_batches = 0; });
    }
  }

  void batch() {
    for (double batch = request_.batch / 2; batch >= 1; batch /= 2) {
      const double whole = std::floor(batch);
      const auto change = [&](Request& r) {
        r.batch = whole;
        r.micro_batches = 0;
      };
      if (try_change(strf("a batch of %.0f per device", whole), change)) return;
    }
  }

  // `member` doubled until it fits.
  void more(const char* what, double Cluster::* member, double per) {
    double value = request_.cluster.*member;
    if (value <= 0) return;
    for (int i = 0; i < 4; ++i) {  // more than 16 times is no advice
      value *= 2;
      const std::string text =
          strf("%s of %s", what,
               format_bytes(static_cast<std::uint64_t>(value / per)).c_str());
      if (try_change(text, [&](Request& r) { r.cluster.*member = value; }))
        return;
    }
  }

  void add_nvme() {
    double bytes =
        8 * total_params(request_.shape) / double(request_.cluster.nodes);
    for (int i = 0; i < 8; ++i, bytes *= 2) {
      const auto change = [&](Request& r) {
        r.cluster.nvme_bytes = bytes;
        r.cluster.nvme_read_rate = r.cluster.nvme_write_rate = 1e9;
      };
      const std::string size = format_bytes(static_cast<std::uint64_t>(bytes));
      if (try_change(strf("NVMe: %s per node", size.c_str()), change)) return;
    }
  }

  void machines() {
    const Cluster& cluster = request_.cluster;
    if (cluster.nvme_bytes <= 0) add_nvme();
    const double ranks = double(cluster.devices_per_node);
    more("NVMe per node", &Cluster::nvme_bytes, 1);
    more("host memory per process", &Cluster::host_bytes, ranks);
    if (!cluster.on_host) more("device memory", &Cluster::device_bytes, 1);
    for (double nodes = 2 * double(cluster.nodes); nodes <= kMostNodes;
         nodes *= 2) {
      const auto change = [&](Request& r) {
        r.cluster.nodes = static_cast<std::uint64_t>(nodes);
        if (r.cluster.node_network_rate <= 0) r.cluster.node_network_rate = 1e9;
        if (r.cluster.device_network_rate <= 0)
          r.cluster.device_network_rate = 1e9;
      };
      if (try_change(strf("%.0f nodes", nodes), change)) return;
    }
  }

  const Request& request_;
  std::vector<std::string> found_;
};

}  // namespace

std::vector<std::string> find_helps(const Request& request) {
  return Search(request).run();
}

}  // namespace zinf::plan
