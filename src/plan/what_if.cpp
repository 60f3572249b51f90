#include "zinf/what_if.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "src/base/strf.h"
#include "src/base/suggest.h"
#include "zinf/bytes.h"

namespace zinf::plan {
namespace {

enum class Kind : std::uint8_t { kBytes, kRate, kCount, kNumber };

struct Knob {
  const char* name;
  Kind kind;
  void (*set)(Request&, double);
};

std::uint64_t whole(double value) { return static_cast<std::uint64_t>(value); }

// One way of a drive; what it does both ways at once changes with their sum.
void set_way(Cluster& cluster, double Cluster::* way, double rate) {
  const auto both = [&] {
    return cluster.nvme_read_rate + cluster.nvme_write_rate;
  };
  const double before = both();
  cluster.*way = rate;
  if (before > 0) cluster.nvme_rate *= both() / before;
}

// Another length of samples or number of layers: measured activations follow.
void set_size(Request& request, std::uint64_t ModelShape::* size,
              double value) {
  const double before = double(request.shape.*size);
  if (before > 0) request.activation_bytes *= value / before;
  request.shape.*size = whole(value);
}

// What others are counted by comes first.
constexpr std::array kFirst = {"nodes", "devices_per_node", "batch", "seq",
                               "layers"};
bool comes_first(std::string_view name) {
  return std::ranges::find(kFirst, name) != kFirst.end();
}

constexpr std::array<Knob, 18> kKnobs = {{
    {"device_memory", Kind::kBytes,
     [](Request& r, double v) { r.cluster.device_bytes = v; }},
    {"host_memory", Kind::kBytes,
     [](Request& r, double v) {
       r.cluster.host_bytes = v * double(r.cluster.devices_per_node);
     }},
    {"nvme_bytes", Kind::kBytes,
     [](Request& r, double v) {
       r.cluster.nvme_bytes = v * double(r.cluster.devices_per_node);
     }},
    {"nodes", Kind::kCount,
     [](Request& r, double v) { r.cluster.nodes = whole(v); }},
    {"devices_per_node", Kind::kCount,
     [](Request& r, double v) { r.cluster.devices_per_node = whole(v); }},
    {"batch", Kind::kNumber, [](Request& r, double v) { set_batch(r, v); }},
    {"micro_batches", Kind::kCount,
     [](Request& r, double v) { r.micro_batches = whole(v); }},
    {"seq", Kind::kCount,
     [](Request& r, double v) { set_size(r, &ModelShape::seq, v); }},
    {"layers", Kind::kCount,
     [](Request& r, double v) { set_size(r, &ModelShape::layers, v); }},
    {"tiles", Kind::kCount, [](Request& r, double v) { r.tiles = whole(v); }},
    {"activation_bytes", Kind::kBytes,
     [](Request& r, double v) { r.activation_bytes = v; }},
    {"achieved", Kind::kNumber,
     [](Request& r, double v) { r.cluster.achieved = v; }},
    {"price", Kind::kNumber,
     [](Request& r, double v) { r.cluster.price_per_hour = v; }},
    {"link_rate", Kind::kRate,
     [](Request& r, double v) { r.cluster.link_rate = v; }},
    {"nvme_read_rate", Kind::kRate,
     [](Request& r, double v) {
       set_way(r.cluster, &Cluster::nvme_read_rate, v);
     }},
    {"nvme_write_rate", Kind::kRate,
     [](Request& r, double v) {
       set_way(r.cluster, &Cluster::nvme_write_rate, v);
     }},
    {"network_rate", Kind::kRate,
     [](Request& r, double v) { r.cluster.node_network_rate = v; }},
    {"peak_flops", Kind::kNumber,
     [](Request& r, double v) {
       r.cluster.peak_flops = v;
       r.cluster.fp32_peak_flops = 0;
     }},
}};

Status bad_value(std::string_view name, std::string_view value,
                 const char* hint) {
  return Status::error(Code::kInvalid,
                       strf("%.*s=%.*s: %s", len(name), name.data(), len(value),
                            value.data(), hint));
}

Result<double> parse(const Knob& knob, std::string_view value) {
  if (knob.kind == Kind::kBytes || knob.kind == Kind::kRate) {
    std::string_view text = value;
    if (knob.kind == Kind::kRate && text.ends_with("/s")) text.remove_suffix(2);
    if (knob.kind == Kind::kRate && text.ends_with('b'))
      return bad_value(knob.name, value,
                       "bits? Say bytes per second, such as 3.1GB/s");
    const Result<std::uint64_t> bytes = parse_bytes(text);
    if (!bytes.ok()) return bytes.status().in(knob.name);
    return static_cast<double>(bytes.value());
  }
  double number = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc() || stop != end || !std::isfinite(number))
    return bad_value(knob.name, value, "not a number");
  if (number < 0 || number > 1e18)
    return bad_value(knob.name, value, "must be from 0 to 10^18");
  if (knob.kind == Kind::kCount && number != std::floor(number))
    return bad_value(knob.name, value, "must be a whole number");
  return number;
}

}  // namespace

std::vector<std::string> what_if_names() {
  std::vector<std::string> names;
  names.reserve(kKnobs.size());
  for (const Knob& knob : kKnobs) names.emplace_back(knob.name);
  return names;
}

Status set(Request& request, std::string_view name, std::string_view value) {
  for (const Knob& knob : kKnobs) {
    if (name != knob.name) continue;
    ZINF_ASSIGN(const double number, parse(knob, value));
    knob.set(request, number);
    return {};
  }
  const std::string hint = name_hint(name, what_if_names());
  return Status::error(Code::kInvalid, strf("what if \"%.*s\": %s", len(name),
                                            name.data(), hint.c_str()));
}

Status set_all(Request& request, const Changes& changes) {
  for (const bool first : {true, false}) {
    for (const auto& [name, value] : changes)
      if (comes_first(name) == first) ZINF_TRY(set(request, name, value));
  }
  return {};
}

Result<std::vector<Variation>> what_if(const Request& request,
                                       std::string_view text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string_view::npos || equals + 1 == text.size()) {
    return Status::error(
        Code::kInvalid,
        strf("what if \"%.*s\": write a name and values, such as "
             "device_memory=24GB,80GB",
             len(text), text.data()));
  }
  const std::string_view name = text.substr(0, equals);
  std::string_view rest = text.substr(equals + 1);
  std::vector<Variation> all;
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view value = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    Variation one{std::string(name), std::string(value), request};
    ZINF_TRY(set(one.request, name, value));
    ZINF_TRY(check(one.request).in(one.name + "=" + one.value));
    all.push_back(std::move(one));
  }
  return all;
}

Result<std::vector<Varied>> sweep(const Request& request,
                                  std::string_view text) {
  ZINF_ASSIGN(std::vector<Variation> variations, what_if(request, text));
  std::vector<Varied> all;
  all.reserve(variations.size());
  for (Variation& one : variations) {
    ZINF_ASSIGN(Advice advice, advise(one.request));
    all.push_back({std::move(one), std::move(advice)});
  }
  return all;
}

}  // namespace zinf::plan
