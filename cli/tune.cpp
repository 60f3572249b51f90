// zinf io tune: finds block size and depth for a directory and keeps them
// there.
#include <algorithm>
#include <cstdio>
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
using io::Profile;

constexpr int kPasses = 3;
constexpr std::uint64_t kLeastBytes = 128 * kMiB;  // all that may be in flight
// Two settings whose bandwidth differs by less are the same within the noise.
constexpr double kGoodEnough = 0.97;

// Bytes read and written per second when both are needed in equal parts.
double score(const Profile& profile) {
  return 2 / (1 / profile.read_gbps + 1 / profile.write_gbps);
}

std::size_t in_flight(const Profile& profile) {
  return profile.block_bytes * static_cast<std::size_t>(profile.depth);
}

Result<double> median_gbps(io::Bench& bench, Direction direction) {
  std::vector<double> rates;
  for (int pass = 0; pass < kPasses; ++pass) {
    ZINF_ASSIGN(io::Sample sample, bench.run(direction));
    rates.push_back(sample.gbps());
  }
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

Result<std::vector<Profile>> sweep(io::Bench& bench) {
  std::vector<Profile> all;
  for (std::size_t block : {256 * kKiB, kMiB, 4 * kMiB}) {
    for (int depth : {2, 4, 8, 16, 32}) {
      all.push_back({.block_bytes = block, .depth = depth});
    }
  }
  Progress progress("tuning", all.size(), Progress::Unit::kSteps);
  std::uint64_t done = 0;
  for (Profile& one : all) {
    progress.set_label(
        strf("%s x %d", format_bytes(one.block_bytes).c_str(), one.depth));
    progress.update(done);
    ZINF_TRY(bench.open({.block_bytes = one.block_bytes, .depth = one.depth}));
    ZINF_ASSIGN(one.read_gbps, median_gbps(bench, Direction::kRead));
    ZINF_ASSIGN(one.write_gbps, median_gbps(bench, Direction::kWrite));
    progress.update(++done);
  }
  return all;
}

// The least memory in flight among those that are as good as the best.
Profile choose(const std::vector<Profile>& all) {
  double best = 0;
  for (const Profile& one : all) best = std::max(best, score(one));
  Profile chosen;
  for (const Profile& one : all) {
    if (score(one) < kGoodEnough * best) continue;
    if (chosen.depth == 0 || in_flight(one) < in_flight(chosen)) chosen = one;
  }
  return chosen;
}

void print_table(const std::vector<Profile>& all, const Profile& chosen,
                 const std::string& path) {
  std::printf("  %10s %6s %11s %11s\n", "block", "depth", "read", "write");
  for (const Profile& one : all) {
    bool is_chosen =
        one.block_bytes == chosen.block_bytes && one.depth == chosen.depth;
    std::printf("%s %10s %6d %11s %11s\n", is_chosen ? ">" : " ",
                format_bytes(one.block_bytes).c_str(), one.depth,
                format_rate(one.read_gbps * 1e9).c_str(),
                format_rate(one.write_gbps * 1e9).c_str());
  }
  std::printf("\nwritten to %s/%s; the engine reads it from there\n",
              path.c_str(), io::kProfileName);
}

}  // namespace

Status run_tune(const TuneArguments& args) {
  if (args.size_bytes < kLeastBytes) {
    return Status::error(Code::kInvalid,
                         strf("--size must be at least %s to tell settings "
                              "apart",
                              format_bytes(kLeastBytes).c_str()));
  }
  ZINF_ASSIGN(io::Bench bench,
              io::Bench::in_directory(args.path, args.size_bytes));
  ZINF_ASSIGN(std::vector<Profile> all, sweep(bench));
  Profile chosen = choose(all);
  ZINF_TRY(io::save_profile(args.path, chosen));
  if (args.json) {
    JsonObject json;
    json.add("block", std::uint64_t{chosen.block_bytes})
        .add("depth", chosen.depth)
        .add("read_gbps", chosen.read_gbps)
        .add("write_gbps", chosen.write_gbps)
        .add("file", args.path + "/" + io::kProfileName);
    std::printf("%s\n", json.text().c_str());
  } else {
    print_table(all, chosen, args.path);
  }
  return {};
}

}  // namespace zinf::cli
