#include "src/plan/helps.h"

#include <cmath>
#include <functional>
#include <utility>

#include "src/base/strf.h"
#include "src/plan/numbers.h"

namespace zinf::plan {
namespace {

constexpr std::uint64_t kMostNodes = 65536;
// More than so many times as much as there is would be no advice.
constexpr double kMostTimes = 16;

bool would_fit(const Request& request) {
  if (!check(request).ok()) return false;
  const auto all = candidates(request);
  if (!all.ok()) return false;
  for (const Candidate& one : all.value())
    if (one.fits()) return true;
  return false;
}

// The least whole number from `low` + 1 to `high` with which it fits, when it
// fits with `high` and not with `low`.
std::uint64_t bisect(std::uint64_t low, std::uint64_t high,
                     const std::function<bool(std::uint64_t)>& fits) {
  while (high - low > 1) {
    const std::uint64_t middle = low + (high - low) / 2;
    (fits(middle) ? high : low) = middle;
  }
  return high;
}

class Search {
 public:
  Search(const Request& request, const std::vector<Candidate>& all)
      : request_(request), all_(all) {}

  std::vector<std::string> run() {
    settings();
    batch();
    machines();
    return std::move(found_);
  }

 private:
  using Change = std::function<void(Request&)>;

  bool fits(const Change& change) const {
    Request changed = request_;
    change(changed);
    return would_fit(changed);
  }
  bool try_change(const std::string& text, const Change& change) {
    if (!fits(change)) return false;
    found_.push_back(text);
    return true;
  }

  // Cost nothing but time.
  void settings() {
    if (!request_.recompute) {
      try_change("recompute activations", [](Request& r) {
        r.recompute = true;
        r.activation_bytes = 0;
      });
    }
    if (request_.precision == "bf16") {
      try_change("split masters (--precision bf16-split)",
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

  // The largest that fits.
  void batch() {
    const auto with = [&](std::uint64_t less) {
      return fits([&](Request& r) {
        set_batch(r, std::ceil(request_.batch) - double(less));
        r.micro_batches = 0;
      });
    };
    const auto most = static_cast<std::uint64_t>(std::ceil(request_.batch));
    if (most < 2 || !with(most - 1)) return;
    const std::uint64_t fitting = most - bisect(0, most - 1, with);
    found_.push_back(
        strf("a batch of %llu per device (--batch %llu%s)",
             static_cast<unsigned long long>(fitting),
             static_cast<unsigned long long>(fitting),
             request_.micro_batches > 0 ? ", without --micro-batches" : ""));
  }

  // Of one tier, for one process.
  void more(Tier tier, const char* what, const char* option) {
    const std::optional<double> least = least_of(all_, tier);
    const double has = capacity(request_.cluster, tier);
    if (!least || *least > kMostTimes * has) return;
    const std::string size = bytes_up_text(*least);
    found_.push_back(strf("%s of %s (%s)", what, size.c_str(), option));
  }

  void add_nvme() {
    Request with = request_;
    with.cluster.nvme_bytes = 1e18;
    with.cluster.nvme_read_rate = with.cluster.nvme_write_rate = 1e9;
    const auto all = candidates(with);
    if (!all.ok()) return;
    const std::optional<double> least = least_of(all.value(), Tier::kNvme);
    if (!least) return;
    found_.push_back(strf("NVMe: %s per process (--nvme-bytes)",
                          bytes_up_text(*least).c_str()));
  }

  void nodes() {
    const auto with = [&](std::uint64_t nodes) {
      return fits([&](Request& r) {
        r.cluster.nodes = nodes;
        if (r.cluster.node_network_rate <= 0) r.cluster.node_network_rate = 1e9;
        if (r.cluster.device_network_rate <= 0)
          r.cluster.device_network_rate = 1e9;
      });
    };
    std::uint64_t enough = 2 * request_.cluster.nodes;
    while (enough <= kMostNodes && !with(enough)) enough *= 2;
    if (enough > kMostNodes) return;
    const std::uint64_t least = bisect(enough / 2, enough, with);
    const bool network = request_.cluster.node_network_rate > 0;
    found_.push_back(strf("%llu nodes (--nodes %llu%s)",
                          static_cast<unsigned long long>(least),
                          static_cast<unsigned long long>(least),
                          network ? "" : ", and --network-rate between them"));
  }

  void machines() {
    if (request_.cluster.nvme_bytes > 0) {
      more(Tier::kNvme, "NVMe per process", "--nvme-bytes");
    } else {
      add_nvme();
    }
    more(Tier::kHost, "host memory per process", "--host-memory");
    if (!request_.cluster.on_host)
      more(Tier::kDevice, "device memory", "--device-memory");
    nodes();
  }

  const Request& request_;
  const std::vector<Candidate>& all_;  // its own
  std::vector<std::string> found_;
};

}  // namespace

std::vector<std::string> find_helps(const Request& request,
                                    const std::vector<Candidate>& all) {
  return Search(request, all).run();
}

}  // namespace zinf::plan
