// zinf io bench: how fast a path is, beside the ceiling.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "cli/command.h"
#include "cli/progress.h"
#include "src/base/align.h"
#include "src/base/json.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/disk.h"
#include "zinf/io_bench.h"

namespace zinf::cli {
namespace {

using io::Direction;

constexpr int kPasses = 5;         // of each kind, in turn; the median counts
constexpr int kPlainThreads = 16;  // at most, for the ceiling

struct Measured {
  Direction direction;
  std::string name;
  std::vector<io::Sample> ours;
  std::vector<io::Sample> plain;
};

double cpu_per_gb(const io::Sample& sample) {
  return sample.cpu_seconds / (static_cast<double>(sample.bytes) / 1e9);
}

io::Sample median(std::vector<io::Sample> samples) {
  std::sort(samples.begin(), samples.end(),
            [](const io::Sample& a, const io::Sample& b) {
              return a.gbps() < b.gbps();
            });
  return samples[samples.size() / 2];
}

std::vector<Measured> directions(const BenchArguments& args) {
  bool all = !args.read && !args.write && !args.mix;
  std::vector<Measured> wanted;
  if (args.write || all) wanted.push_back({Direction::kWrite, "write", {}, {}});
  if (args.read || all) wanted.push_back({Direction::kRead, "read", {}, {}});
  if (args.mix) wanted.push_back({Direction::kMix, "mix", {}, {}});
  return wanted;
}

Result<io::Bench> make_bench(const BenchArguments& args) {
  std::error_code error;
  if (std::filesystem::is_directory(args.path, error)) {
    return io::Bench::in_directory(args.path, args.size_bytes);
  }
  bool is_file = std::filesystem::exists(args.path, error);
  if (is_file && !args.overwrite) {
    return Status::error(
        Code::kInvalid,
        args.path +
            " is a file: name its directory, or say --overwrite if its "
            "content may be lost");
  }
  if (is_file && args.size_given) {
    return Status::error(Code::kInvalid,
                         "--size is for directories: a file that is named is "
                         "overwritten whole");
  }
  return io::Bench::on_file(args.path);
}

// Runs the action under a progress bar of the bytes that it moves.
Status with_bar(io::Bench& bench, const char* label,
                const std::function<Status()>& action) {
  std::optional<Progress> bar;
  bench.set_progress([&](std::uint64_t done, std::uint64_t total) {
    if (!bar) bar.emplace(label, total, Progress::Unit::kBytes);
    bar->update(done);
  });
  Status status = action();
  bench.set_progress({});
  return status;
}

Status measure(io::Bench& bench, const BenchArguments& args,
               std::vector<Measured>& wanted) {
  int threads = std::min(args.depth, kPlainThreads);
  std::uint64_t total = 0;
  for (const Measured& one : wanted) {
    total += kPasses * (one.direction == Direction::kMix ? 1 : 2);
  }
  Progress progress("measuring", total, Progress::Unit::kSteps);
  std::uint64_t done = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    for (Measured& one : wanted) {
      progress.set_label(one.name);
      ZINF_ASSIGN(io::Sample sample, bench.run(one.direction));
      one.ours.push_back(sample);
      progress.update(++done);
      if (one.direction == Direction::kMix) continue;
      ZINF_ASSIGN(io::Sample plain, bench.run_plain(one.direction, threads));
      one.plain.push_back(plain);
      progress.update(++done);
    }
  }
  return {};
}

void print_table(const io::Bench& bench, const BenchArguments& args,
                 const std::vector<Measured>& measured) {
  std::printf("%s\n  %s, %s, blocks of %s, %d in flight\n\n", args.path.c_str(),
              bench.io().reason().c_str(),
              bench.direct() ? "O_DIRECT" : "through the page cache",
              format_bytes(args.block_bytes).c_str(), args.depth);
  std::printf("          %12s %20s %22s\n", "zinf", "plain pread/pwrite",
              "CPU seconds per GB");
  for (const Measured& one : measured) {
    io::Sample ours = median(one.ours);
    std::string ceiling = "-";
    if (!one.plain.empty()) {
      double plain = median(one.plain).gbps();
      ceiling = strf("%s (%.0f%%)", format_rate(plain * 1e9).c_str(),
                     100 * ours.gbps() / plain);
    }
    std::printf("  %-7s %12s %21s %20.3f\n", one.name.c_str(),
                format_rate(ours.gbps() * 1e9).c_str(), ceiling.c_str(),
                cpu_per_gb(ours));
  }
  std::printf(
      "\n  every byte read back and compared; medians of %d passes of "
      "%s\n",
      kPasses, format_bytes(median(measured[0].ours).bytes).c_str());
}

void print_json(const io::Bench& bench, const BenchArguments& args,
                const std::vector<Measured>& measured) {
  JsonObject json;
  json.add("path", args.path)
      .add("backend", io::backend_name(bench.io().backend()))
      .add("direct", bench.direct())
      .add("block", args.block_bytes)
      .add("depth", args.depth)
      .add("bytes", measured[0].ours[0].bytes)
      .add("passes", kPasses)
      .add("verified", true);
  // What was not measured is null.
  for (std::string name : {"read", "write", "mix"}) {
    std::optional<double> gbps;
    std::optional<double> cpu;
    std::optional<double> ceiling;
    for (const Measured& one : measured) {
      if (one.name != name) continue;
      gbps = median(one.ours).gbps();
      cpu = cpu_per_gb(median(one.ours));
      if (!one.plain.empty()) ceiling = median(one.plain).gbps();
    }
    json.add(name + "_gbps", gbps)
        .add(name + "_cpu_seconds_per_gb", cpu)
        .add("ceiling_" + name + "_gbps", ceiling);
  }
  std::printf("%s\n", json.text().c_str());
}

}  // namespace

Status run_bench(const BenchArguments& args) {
  ZINF_ASSIGN(io::Backend backend, io::parse_backend(args.backend));
  io::Options options{.backend = backend,
                      .block_bytes = args.block_bytes,
                      .depth = args.depth,
                      .threads = std::clamp(args.depth, 1, kPlainThreads)};
  ZINF_TRY(options.validate());
  if (backend == io::Backend::kMemory) {
    return Status::error(Code::kInvalid, "the memory back end has no disk");
  }
  ZINF_ASSIGN(io::Bench bench, make_bench(args));
  ZINF_TRY(with_bar(bench, "laying out", [&] { return bench.open(options); }));
  std::vector<Measured> measured = directions(args);
  ZINF_TRY(measure(bench, args, measured));
  ZINF_TRY(with_bar(bench, "verifying", [&] { return bench.verify(); }));
  if (args.json) {
    print_json(bench, args, measured);
  } else {
    print_table(bench, args, measured);
  }
  return {};
}

}  // namespace zinf::cli
