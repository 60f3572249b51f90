// zinf io bench: how fast a path is, beside the ceiling.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/command.h"
#include "cli/progress.h"
#include "src/base/align.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/disk.h"
#include "zinf/io_bench.h"

namespace zinf::cli {
namespace {

using io::Direction;

constexpr int kPasses = 5;         // of each kind, in turn; the median counts
constexpr int kPlainThreads = 16;  // at most, for the ceiling

struct BenchArguments {
  std::string path;
  std::uint64_t block_bytes = kMiB;
  std::uint64_t size_bytes = kGiB;
  int depth = 16;
  std::string backend = "auto";
  bool read = false;
  bool write = false;
  bool mix = false;
  bool overwrite = false;
  bool json = false;
};

struct Measured {
  Direction direction;
  const char* name;
  std::vector<io::Sample> ours;
  std::vector<io::Sample> plain;
};

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
  if (std::filesystem::exists(args.path, error) && !args.overwrite) {
    return Status::error(
        Code::kInvalid,
        args.path +
            " is a file: name its directory, or say --overwrite if its "
            "content may be lost");
  }
  return io::Bench::on_file(args.path);
}

Status measure(io::Bench& bench, const BenchArguments& args,
               std::vector<Measured>& wanted) {
  int threads = std::min(args.depth, kPlainThreads);
  std::uint64_t total = std::uint64_t{2} * kPasses * wanted.size();
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
  std::printf("          %12s %20s %22s\n", "zinf", "ceiling (plain loop)",
              "CPU seconds per GB");
  for (const Measured& one : measured) {
    io::Sample ours = median(one.ours);
    std::string ceiling = "-";
    if (!one.plain.empty()) {
      double plain = median(one.plain).gbps();
      ceiling = strf("%s (%.0f%%)", format_rate(plain * 1e9).c_str(),
                     100 * ours.gbps() / plain);
    }
    std::printf("  %-7s %12s %21s %20.3f\n", one.name,
                format_rate(ours.gbps() * 1e9).c_str(), ceiling.c_str(),
                ours.cpu_seconds / (static_cast<double>(ours.bytes) / 1e9));
  }
  std::printf(
      "\n  every byte read back and compared; medians of %d passes of "
      "%s\n",
      kPasses, format_bytes(median(measured[0].ours).bytes).c_str());
}

void print_json(const io::Bench& bench, const BenchArguments& args,
                const std::vector<Measured>& measured) {
  nlohmann::ordered_json json = {
      {"path", args.path},
      {"backend", io::backend_name(bench.io().backend())},
      {"direct", bench.direct()},
      {"block", args.block_bytes},
      {"depth", args.depth},
      {"bytes", measured[0].ours[0].bytes},
      {"passes", kPasses},
      {"verified", true}};
  for (const Measured& one : measured) {
    std::string name = one.name;
    io::Sample ours = median(one.ours);
    json[name + "_gbps"] = ours.gbps();
    json[name + "_cpu_seconds_per_gb"] =
        ours.cpu_seconds / (static_cast<double>(ours.bytes) / 1e9);
    if (!one.plain.empty()) {
      json["ceiling_" + name + "_gbps"] = median(one.plain).gbps();
    }
  }
  std::printf("%s\n", json.dump().c_str());
}

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
  {
    Progress progress("laying out", args.size_bytes, Progress::Unit::kBytes);
    bench.set_progress([&](std::uint64_t done, std::uint64_t /*total*/) {
      progress.update(done);
    });
    ZINF_TRY(bench.open(options));
    bench.set_progress({});
  }
  std::vector<Measured> measured = directions(args);
  ZINF_TRY(measure(bench, args, measured));
  {
    Progress progress("verifying", args.size_bytes, Progress::Unit::kBytes);
    bench.set_progress([&](std::uint64_t done, std::uint64_t /*total*/) {
      progress.update(done);
    });
    ZINF_TRY(bench.verify());
    bench.set_progress({});
  }
  if (args.json) {
    print_json(bench, args, measured);
  } else {
    print_table(bench, args, measured);
  }
  return {};
}

}  // namespace

void add_bench(CLI::App& io, Chosen& chosen) {
  CLI::App* app = io.add_subcommand("bench", "How fast a path is");
  auto args = std::make_shared<BenchArguments>();
  app->add_option("path", args->path, "A directory on the disk to measure")
      ->required()
      ->type_name("PATH");
  add_bytes(*app, "--block", args->block_bytes, "Size of one transfer");
  app->add_option("--depth", args->depth, "Transfers in flight")
      ->capture_default_str();
  add_bytes(*app, "--size", args->size_bytes, "Size of the file");
  app->add_flag("--read", args->read, "Measure reading");
  app->add_flag("--write", args->write, "Measure writing");
  app->add_flag("--mix", args->mix, "Measure both directions at once");
  app->add_option("--backend", args->backend, "auto, io_uring or threads")
      ->capture_default_str();
  app->add_flag("--overwrite", args->overwrite,
                "PATH is a file whose content may be lost");
  app->add_flag("--json", args->json, "Print one JSON object");
  app->callback(
      [args, &chosen] { chosen.run = [args] { return run_bench(*args); }; });
}

}  // namespace zinf::cli
