// How fast a whole version streams through the store, beside io::Bench on the
// same disk with the same blocks and depth: one JSON line.
//
//   store_bench DIRECTORY [--bytes 4GB] [--pairs 7] [--paths]
//
// --paths measures two paths instead, one limited to a tenth of the other's
// bandwidth, against the sum of what each reaches alone.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/io_bench.h"
#include "zinf/machine.h"
#include "zinf/store.h"

namespace zinf {
namespace {

// As io::Bench: four requests of 8 MiB in flight (per direction).
constexpr std::size_t kStateBytes = 8 * kMiB;
constexpr std::size_t kSlots = 4;

struct Arguments {
  std::string directory;
  std::uint64_t bytes = 4'000'000'000;
  int pairs = 7;
  bool paths = false;
};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Memory for states under way, registered with the store.
class Slots {
 public:
  Slots(std::size_t count, std::size_t bytes) : bytes_(bytes) {
    std::size_t total = count * bytes + kHugePage;
    void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ZINF_CHECK(memory != MAP_FAILED, "no memory");
    auto address =
        align_up(reinterpret_cast<std::uintptr_t>(memory), kHugePage);
    data_ = reinterpret_cast<std::byte*>(address);
    all_ = {data_, count * bytes};
    madvise(data_, all_.size(), MADV_HUGEPAGE);
    std::uint64_t word = 1;
    for (std::size_t i = 0; i + 8 <= all_.size(); i += 8) {
      word = word * 6364136223846793005u + 1442695040888963407u;
      std::memcpy(data_ + i, &word, 8);
    }
  }
  std::span<std::byte> at(std::size_t i) {
    return {data_ + i * bytes_, bytes_};
  }
  std::span<std::byte> all() { return all_; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
  std::span<std::byte> all_;
};

class StoreBench {
 public:
  static Result<StoreBench> create(const StoreOptions& base,
                                   std::uint64_t bytes, Verify verify,
                                   std::size_t slots = kSlots) {
    StoreOptions options = base;
    options.verify = verify;
    options.kept = 0;
    options.state_bytes = bytes;
    options.num_states = bytes / kStateBytes;
    StoreBench bench;
    bench.slots_count_ = slots;
    ZINF_ASSIGN(bench.store_, Store::create(options));
    for (std::size_t i = 0; i < options.num_states; ++i) {
      ZINF_ASSIGN(StateId id, bench.store_->define({.unit = strf("u%zu", i),
                                                    .state = "exp_avg",
                                                    .dtype = "float32",
                                                    .shape = {kStateBytes / 4},
                                                    .bytes = kStateBytes}));
      bench.ids_.push_back(id);
    }
    bench.slots_ = std::make_unique<Slots>(2 * slots, kStateBytes);
    bench.registrations_ = bench.store_->register_memory(bench.slots_->all());
    ZINF_TRY(bench.run(io::Direction::kWrite).status());  // lays out
    return bench;
  }

  // GB/s of all states once; a mix writes one half while it reads the other.
  Result<double> run(io::Direction direction) {
    std::size_t count = ids_.size();
    std::deque<Store::Write> writes;
    std::deque<Store::Read> reads;
    auto begin = Clock::now();
    for (std::size_t i = 0; i < count; ++i) {
      bool mix = direction == io::Direction::kMix;
      bool write = direction == io::Direction::kWrite || (mix && i % 2 == 0);
      std::size_t which = !mix ? i : write ? i / 2 : count / 2 + i / 2;
      // All that is under way together is what Bench has.
      if (writes.size() + reads.size() == slots_count_) {
        if (!writes.empty() && (reads.empty() || i % 2 == 0)) {
          ZINF_TRY(writes.front().wait());
          writes.pop_front();
        } else {
          ZINF_TRY(reads.front().wait());
          reads.pop_front();
        }
      }
      if (write) {
        writes.push_back(store_->put(ids_[which], out(i)));
      } else {
        reads.push_back(store_->get(ids_[which], in(i)));
      }
    }
    for (Store::Write& write : writes) ZINF_TRY(write.wait());
    for (Store::Read& read : reads) ZINF_TRY(read.wait());
    double seconds = seconds_since(begin);
    return static_cast<double>(count * kStateBytes) / seconds / 1e9;
  }

  StoreStats stats() const { return store_->stats(); }

 private:
  // Content depends on the slot alone; which slot wrote a state last does not
  // matter to the time.
  std::span<std::byte> out(std::size_t i) {
    return slots_->at(i % slots_count_);
  }
  std::span<std::byte> in(std::size_t i) {
    return slots_->at(slots_count_ + i % slots_count_);
  }

  std::size_t slots_count_ = kSlots;
  std::unique_ptr<Slots> slots_;
  std::unique_ptr<Store> store_;
  std::vector<io::Registration> registrations_;
  std::vector<StateId> ids_;
};

struct Spread {
  double median = 0;
  double low = 0;
  double high = 0;
};

Spread spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

std::string ratio_text(const Spread& ratio) {
  return strf("%.3f (%.3f-%.3f)", ratio.median, ratio.low, ratio.high);
}

Status compare_one_path(const Arguments& args) {
  std::string run = args.directory + "/store_bench.run";
  std::error_code ignored;
  std::string json;
  for (Verify verify : {Verify::kNever, Verify::kAlways}) {
    std::filesystem::remove_all(run, ignored);
    StoreOptions options;
    options.paths = {{.path = run}};
    ZINF_ASSIGN(StoreBench ours,
                StoreBench::create(options, args.bytes, verify));
    ZINF_ASSIGN(io::Bench bench,
                io::Bench::in_directory(args.directory, args.bytes));
    ZINF_TRY(bench.open(options.io));
    const char* name = verify == Verify::kNever ? "plain" : "checksums";
    for (auto [direction, label] : {std::pair{io::Direction::kWrite, "write"},
                                    std::pair{io::Direction::kRead, "read"},
                                    std::pair{io::Direction::kMix, "mix"}}) {
      std::vector<double> gbps;
      std::vector<double> bench_gbps;
      std::vector<double> ratios;
      for (int pair = 0; pair < args.pairs; ++pair) {
        ZINF_ASSIGN(double mine, ours.run(direction));
        ZINF_ASSIGN(io::Sample theirs, bench.run(direction));
        gbps.push_back(mine);
        bench_gbps.push_back(theirs.gbps());
        ratios.push_back(mine / theirs.gbps());
      }
      Spread ratio = spread(ratios);
      std::printf("%-9s %-5s  store %.2f GB/s, io bench %.2f GB/s: %s\n", name,
                  label, spread(gbps).median, spread(bench_gbps).median,
                  ratio_text(ratio).c_str());
      json += strf("%s\"%s_%s_gbps\": %.4f, \"%s_%s_ratio\": %.4f",
                   json.empty() ? "" : ", ", name, label, spread(gbps).median,
                   name, label, ratio.median);
    }
    StoreStats stats = ours.stats();
    if (stats.checksum_bytes > 0) {
      double rate = static_cast<double>(stats.checksum_bytes) /
                    stats.checksum_seconds / 1e9;
      std::printf("checksums at %.1f GB/s on the calling thread\n", rate);
      json += strf(", \"checksum_gbps\": %.2f", rate);
    }
  }
  std::filesystem::remove_all(run, ignored);
  std::printf("{\"bytes\": %llu, \"pairs\": %d, %s}\n",
              static_cast<unsigned long long>(args.bytes), args.pairs,
              json.c_str());
  return {};
}

// Both paths are limited, far below the disk that they share, so that the disk
// itself is not what is measured.
Status compare_two_paths(const Arguments& args) {
  constexpr double kFast = 1.0e9;
  auto limited = [](double rate) {
    std::vector<io::Fault> faults;
    for (io::Operation on : {io::Operation::kRead, io::Operation::kWrite}) {
      faults.push_back(
          {.kind = io::Fault::Kind::kRate, .on = on, .bytes_per_second = rate});
    }
    return faults;
  };
  std::string fast = args.directory + "/store_bench.fast";
  std::string slow = args.directory + "/store_bench.slow";
  StorePath fast_path{.path = fast, .weight = 10, .faults = limited(kFast)};
  StorePath slow_path{.path = slow, .weight = 1, .faults = limited(kFast / 10)};
  auto measure = [&](std::vector<StorePath> paths, std::uint64_t bytes,
                     io::Direction direction) -> Result<double> {
    std::error_code ignored;
    std::filesystem::remove_all(fast, ignored);
    std::filesystem::remove_all(slow, ignored);
    StoreOptions options;
    options.paths = std::move(paths);
    ZINF_ASSIGN(StoreBench bench,
                StoreBench::create(options, bytes, Verify::kNever, 16));
    return bench.run(direction);
  };
  std::string json;
  for (auto [direction, label] : {std::pair{io::Direction::kWrite, "write"},
                                  std::pair{io::Direction::kRead, "read"}}) {
    std::vector<double> ratios;
    for (int pair = 0; pair < args.pairs; ++pair) {
      ZINF_ASSIGN(double a, measure({fast_path}, args.bytes, direction));
      ZINF_ASSIGN(double b, measure({slow_path}, args.bytes / 10, direction));
      ZINF_ASSIGN(double both,
                  measure({fast_path, slow_path}, args.bytes, direction));
      ratios.push_back(both / (a + b));
    }
    Spread ratio = spread(ratios);
    std::printf("two paths, %-5s  of the sum: %s\n", label,
                ratio_text(ratio).c_str());
    json += strf(", \"paths_%s_ratio\": %.4f", label, ratio.median);
  }
  std::error_code ignored;
  std::filesystem::remove_all(fast, ignored);
  std::filesystem::remove_all(slow, ignored);
  std::printf("{\"bytes\": %llu, \"pairs\": %d%s}\n",
              static_cast<unsigned long long>(args.bytes), args.pairs,
              json.c_str());
  return {};
}

Result<Arguments> parse(int argc, char** argv) {
  Arguments args;
  Status usage = Status::error(
      Code::kInvalid,
      "store_bench DIRECTORY [--bytes 4GB] [--pairs 7] [--paths]");
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word == "--paths") {
      args.paths = true;
    } else if (word == "--bytes" && i + 1 < argc) {
      ZINF_ASSIGN(args.bytes, parse_bytes(argv[++i]));
    } else if (word == "--pairs" && i + 1 < argc) {
      args.pairs = std::atoi(argv[++i]);
    } else if (word[0] != '-' && args.directory.empty()) {
      args.directory = word;
    } else {
      return usage;
    }
  }
  args.bytes = align_down(args.bytes, std::uint64_t{kStateBytes});
  if (args.directory.empty() || args.pairs < 1 || args.bytes == 0) return usage;
  return args;
}

Status run(int argc, char** argv) {
  ZINF_ASSIGN(Arguments args, parse(argc, argv));
  Machine machine = inspect_machine();
  std::printf("%s, %d cores, kernel %s\n", machine.cpu.c_str(), machine.cores,
              machine.kernel.c_str());
#ifndef NDEBUG
  std::printf("warning: a debug build\n");
#endif
  return args.paths ? compare_two_paths(args) : compare_one_path(args);
}

}  // namespace
}  // namespace zinf

int main(int argc, char** argv) {
  zinf::Status status = zinf::run(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.text().c_str());
  return status.ok() ? 0 : 1;
}
