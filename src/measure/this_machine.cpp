#include "zinf/this_machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "src/base/align.h"
#include "zinf/disk.h"
#include "zinf/io_bench.h"
#include "zinf/machine.h"

namespace zinf::plan {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Eight independent chains of multiply and add hide their latency; vectors of
// 16 floats are two or four registers where those are narrower.
using Floats = float __attribute__((vector_size(64)));
constexpr int kChains = 8;
constexpr int kRounds = 1 << 16;
constexpr double kFlops = 2.0 * 16 * kChains * kRounds;

#define ZINF_FMA_LOOP                                      \
  Floats sums[kChains] = {};                               \
  const Floats factor = Floats{} + seed;                   \
  for (int round = 0; round < kRounds; ++round) {          \
    for (Floats & sum : sums) sum = sum * factor + factor; \
  }                                                        \
  float all = 0;                                           \
  for (const Floats& sum : sums) all += sum[0];            \
  return all;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) float fma_avx512(float seed) {
  ZINF_FMA_LOOP
}
__attribute__((target("avx2,fma"))) float fma_avx2(float seed) { ZINF_FMA_LOOP }
#endif
float fma_baseline(float seed) { ZINF_FMA_LOOP }
#undef ZINF_FMA_LOOP

float (*best_fma())(float) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return fma_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return fma_avx2;
#endif
  return fma_baseline;
}

// Runs body(core) on every core for about `seconds`; how often, per second.
template <typename Body>
double runs_per_second(int cores, double seconds, const Body& body) {
  std::vector<double> rates(static_cast<std::size_t>(cores));
  std::vector<std::thread> threads;
  threads.reserve(rates.size());
  for (std::size_t core = 0; core < rates.size(); ++core) {
    threads.emplace_back([&rates, &body, seconds, core] {
      const auto begin = Clock::now();
      double count = 0;
      while (seconds_since(begin) < seconds) {
        body(core);
        ++count;
      }
      rates[core] = count / seconds_since(begin);
    });
  }
  for (std::thread& thread : threads) thread.join();
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum;
}

double measure_flops(int cores) {
  const auto fma = best_fma();
  return kFlops * runs_per_second(cores, 0.3, [fma](std::size_t) {
           volatile float sink = fma(0.5F);
           (void)sink;
         });
}

// Copies of more than caches hold: every byte is read and written. All cores
// together take no more than this.
constexpr std::size_t kCopiedBytes = 512 * kMiB;
double measure_memory(int cores) {
  const std::size_t bytes = std::min<std::size_t>(
      64 * kMiB, kCopiedBytes / (2 * static_cast<std::size_t>(cores)));
  const auto count = static_cast<std::size_t>(cores);
  std::vector<std::vector<char>> from(count, std::vector<char>(bytes, 1));
  std::vector<std::vector<char>> to = from;
  const auto copy = [&](std::size_t core) {
    std::memcpy(to[core].data(), from[core].data(), bytes);
  };
  return 2.0 * double(bytes) * runs_per_second(cores, 0.3, copy);
}

// Moves bytes both ways, on a thread of its own, until its end.
class Traffic {
 public:
  explicit Traffic(io::Bench& bench)
      : thread_([this, &bench] {
          do {
            const Result<io::Sample> moved = bench.run(io::Direction::kMix);
            status_ = moved.status();
            if (!moved.ok()) return;
            bytes_ += double(moved.value().bytes);
            seconds_ += moved.value().seconds;
          } while (!stop_);
        }) {}
  ~Traffic() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;

  Result<double> end() {  // bytes per second
    stop_ = true;
    thread_.join();
    if (!status_.ok()) return status_;
    return bytes_ / seconds_;
  }

 private:
  std::atomic<bool> stop_ = false;
  double bytes_ = 0;
  double seconds_ = 0;
  Status status_;
  std::thread thread_;
};

// What a byte on its way takes from arithmetic and from copies: training has
// both, and the mean of the two counts.
Result<double> measure_drag(int cores, io::Bench& bench,
                            const Cluster& cluster) {
  const auto lost = [&](double alone, auto&& measure) -> Result<double> {
    Traffic traffic(bench);
    const double beside = measure(cores);
    ZINF_ASSIGN(const double rate, traffic.end());
    return std::max(0.0, 1 - beside / alone) / rate;
  };
  ZINF_ASSIGN(const double arithmetic, lost(cluster.peak_flops, measure_flops));
  ZINF_ASSIGN(const double copies,
              lost(cluster.host_memory_rate, measure_memory));
  return (arithmetic + copies) / 2;
}

Status measure_disk(const std::string& path, int cores, Cluster& cluster) {
  ZINF_ASSIGN(const io::Disk disk, io::inspect_disk(path));
  ZINF_ASSIGN(io::Bench bench, io::Bench::in_directory(path, 256 * kMiB));
  ZINF_TRY(bench.open({}));
  ZINF_ASSIGN(const io::Sample write, bench.run(io::Direction::kWrite));
  ZINF_ASSIGN(const io::Sample read, bench.run(io::Direction::kRead));
  cluster.nvme_bytes = double(disk.free_bytes);
  cluster.nvme_write_rate = write.gbps() * 1e9;
  cluster.nvme_read_rate = read.gbps() * 1e9;
  ZINF_ASSIGN(const io::Sample mix, bench.run(io::Direction::kMix));
  cluster.nvme_rate = mix.gbps() * 1e9;
  ZINF_ASSIGN(cluster.nvme_drag, measure_drag(cores, bench, cluster));
  return {};
}

}  // namespace

Result<Cluster> measure_this_machine(
    const std::string& path, const std::function<void(std::uint64_t)>& told) {
  const Machine machine = inspect_machine();
  Cluster cluster{.name = "this machine", .on_host = true};
  cluster.host_bytes = double(machine.available_bytes);
  if (machine.cgroup_limit_bytes) {
    cluster.host_bytes =
        std::min(cluster.host_bytes, double(*machine.cgroup_limit_bytes));
  }
  const auto tell = [&](std::uint64_t done) {
    if (told) told(done);
  };
  const int cores = std::max(machine.cores, 1);
  cluster.peak_flops = measure_flops(cores);
  tell(1);
  cluster.host_memory_rate = measure_memory(cores);
  tell(2);
  if (!path.empty()) {
    ZINF_TRY(
        measure_disk(path, cores, cluster).in("plan: measuring this machine"));
  }
  ZINF_TRY(check(cluster));
  tell(kMeasuringSteps);
  return cluster;
}

}  // namespace zinf::plan
