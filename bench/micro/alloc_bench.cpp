// The arena beside malloc: nanoseconds per small block, and memory held beyond
// what is live over recorded training steps.
//
//   alloc_bench            everything, then one line of JSON
//   alloc_bench --small    small blocks only
//   alloc_bench --replay   replays only
//
// Replays run in processes of their own (this program again, as
// `--one ALLOCATOR TRACE`), so that the one's memory does not show in the
// other's.
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "src/base/strf.h"
#include "tests/unit/mem/alloc_trace.h"
#include "zinf/arena.h"

namespace zinf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 9;
constexpr int kBatch = 64;
constexpr std::size_t kTouchedEvents = 100'000;
constexpr std::size_t kReplayEvents = 1'000'000;
constexpr std::array<const char*, 3> kTraces = {"gpt2", "llama", "cnn"};

struct Malloc {
  void* allocate(std::size_t bytes) {
    // What torch's own CPU allocator calls.
    void* block = nullptr;
    return posix_memalign(&block, 64, bytes) == 0 ? block : nullptr;
  }
  void free(void* block, std::size_t = 0) { std::free(block); }
};

struct PlainMalloc {
  void* allocate(std::size_t bytes) { return std::malloc(bytes); }
  void free(void* block, std::size_t = 0) { std::free(block); }
};

struct Ours {
  Arena& arena;
  void* allocate(std::size_t bytes) { return arena.allocate(bytes); }
  void free(void* block, std::size_t = 0) { Arena::free(block); }
};

// Writes one word per page, as a kernel that fills the tensor would fault it.
template <typename Heap>
struct Touching {
  Heap& heap;
  void* allocate(std::size_t bytes) {
    auto* block = static_cast<char*>(heap.allocate(bytes));
    for (std::size_t at = 0; at < bytes; at += 4096) block[at] = 1;
    if (bytes > 0) block[bytes - 1] = 1;
    return block;
  }
  void free(void* block, std::size_t bytes) { heap.free(block, bytes); }
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::size_t proc_kib(const char* key) {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(key, 0) == 0) {
      return std::strtoull(line.c_str() + std::strlen(key), nullptr, 10);
    }
  }
  return 0;
}

// ---- small blocks ----

// Nanoseconds per allocate + free: `kBatch` blocks at a time, freed in another
// order than they came.
template <typename Heap>
double time_batches(Heap heap, std::size_t bytes, int num_batches) {
  std::array<void*, kBatch> blocks{};
  std::array<int, kBatch> order{};
  for (int i = 0; i < kBatch; ++i) order[i] = (i * 37) % kBatch;
  for (void*& block : blocks) block = heap.allocate(bytes);
  for (void* block : blocks) heap.free(block);
  Clock::time_point start = Clock::now();
  for (int batch = 0; batch < num_batches; ++batch) {
    for (void*& block : blocks) {
      block = heap.allocate(bytes);
      *static_cast<volatile char*>(block) = 1;
    }
    for (int i : order) heap.free(blocks[static_cast<std::size_t>(i)]);
  }
  return seconds_since(start) * 1e9 / (num_batches * kBatch);
}

// One block at a time: the shortest path there is.
template <typename Heap>
double time_pairs(Heap heap, std::size_t bytes, int num_pairs) {
  heap.free(heap.allocate(bytes));
  Clock::time_point start = Clock::now();
  for (int i = 0; i < num_pairs; ++i) {
    void* block = heap.allocate(bytes);
    *static_cast<volatile char*>(block) = 1;
    heap.free(block);
  }
  return seconds_since(start) * 1e9 / num_pairs;
}

template <typename Heap>
double time_threads(Heap heap, std::size_t bytes, int threads, bool batches) {
  std::vector<double> times(static_cast<std::size_t>(threads));
  std::vector<std::thread> running;
  for (double& time : times) {
    running.emplace_back([&time, heap, bytes, batches] {
      time = batches ? time_batches(heap, bytes, 600)
                     : time_pairs(heap, bytes, 60'000);
    });
  }
  for (std::thread& thread : running) thread.join();
  return *std::max_element(times.begin(), times.end());
}

struct Compared {
  double ours = 0;
  double theirs = 0;
  double ratio = 0;
  double ratio_low = 0;
  double ratio_high = 0;
};

// Interleaved, so that a noisy neighbour meets both.
Compared compare(Arena& arena, std::size_t bytes, int threads, bool batches) {
  std::vector<double> ours;
  std::vector<double> theirs;
  std::vector<double> ratios;
  for (int round = 0; round < kRounds; ++round) {
    ours.push_back(time_threads(Ours{arena}, bytes, threads, batches));
    theirs.push_back(time_threads(PlainMalloc{}, bytes, threads, batches));
    ratios.push_back(ours.back() / theirs.back());
  }
  return {median(ours), median(theirs), median(ratios),
          *std::min_element(ratios.begin(), ratios.end()),
          *std::max_element(ratios.begin(), ratios.end())};
}

std::string bench_small() {
  // malloc at its best: by default it gives the memory of most batches back to
  // the system, and its page faults (50 times the cost) would be all we see.
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  Arena arena = Arena::create().value();
  std::string json;
  std::printf("%8s %8s %8s %10s %10s %7s  %s\n", "bytes", "threads", "pattern",
              "arena ns", "malloc ns", "ratio", "spread");
  for (int threads : {1, 2}) {
    for (bool batches : {false, true}) {
      for (std::size_t bytes : {64, 256, 1024, 4096, 16384, 32768}) {
        Compared c = compare(arena, bytes, threads, batches);
        const char* pattern = batches ? "batch" : "pair";
        std::printf("%8zu %8d %8s %10.1f %10.1f %7.2f  %.2f..%.2f\n", bytes,
                    threads, pattern, c.ours, c.theirs, c.ratio, c.ratio_low,
                    c.ratio_high);
        json += strf(
            "%s{\"bytes\":%zu,\"threads\":%d,\"pattern\":\"%s\",\"arena_ns\":"
            "%.1f,\"malloc_ns\":%.1f,\"ratio\":%.3f,\"low\":%.3f,\"high\":"
            "%.3f}",
            json.empty() ? "" : ",", bytes, threads, pattern, c.ours, c.theirs,
            c.ratio, c.ratio_low, c.ratio_high);
      }
    }
  }
  return "\"small\":[" + json + "]";
}

// ---- replays ----

AllocTrace load_trace(const std::string& name) {
  return AllocTrace::load(std::string(ZINF_TEST_DATA) + "/allocs_" + name +
                          ".bin")
      .value();
}

// Resident memory at its most, and when all is freed.
template <typename Heap>
std::string replay_touched(Heap& heap, const AllocTrace& trace) {
  std::size_t before = proc_kib("VmRSS:");
  Clock::time_point start = Clock::now();
  std::size_t live_high = 0;
  std::size_t live = 0;
  double seconds = 0;
  std::size_t resident = 0;
  {
    Touching<Heap> touching{heap};
    TraceReplay<Touching<Heap>> replay(trace, touching);
    replay.run(kTouchedEvents);
    seconds = seconds_since(start);
    live_high = replay.live_high_bytes();
    live = replay.live_bytes();
    resident = proc_kib("VmRSS:") - before;
  }
  double mb = 1e6;
  double high = static_cast<double>(proc_kib("VmHWM:") - before) * 1024;
  double over = high / static_cast<double>(live_high) - 1;
  return strf(
      "\"live_high_mb\":%.1f,\"rss_high_mb\":%.1f,\"rss_waste\":%.4f,"
      "\"live_end_mb\":%.1f,\"rss_end_mb\":%.1f,\"touched_seconds\":%.2f",
      static_cast<double>(live_high) / mb, high / mb, over,
      static_cast<double>(live) / mb, static_cast<double>(resident) * 1024 / mb,
      seconds);
}

std::string replay_events(Arena& arena, const AllocTrace& trace) {
  Ours ours{arena};
  Clock::time_point start = Clock::now();
  TraceReplay<Ours> replay(trace, ours);
  replay.run(kReplayEvents);
  double ns =
      seconds_since(start) * 1e9 / static_cast<double>(replay.num_events());
  ArenaStats stats = arena.stats();
  auto live_high = static_cast<double>(replay.live_high_bytes());
  double waste =
      static_cast<double>(stats.committed_high_bytes) / live_high - 1;
  return strf(
      ",\"events\":%zu,\"waste\":%.4f,\"ns_per_event\":%.0f,"
      "\"fresh_gb\":%.2f,\"purged_gb\":%.2f,\"free_ranges\":%zu",
      replay.num_events(), waste, ns,
      static_cast<double>(stats.fresh_bytes) / 1e9,
      static_cast<double>(stats.purged_bytes) / 1e9, stats.num_free_ranges);
}

// What the committed pages beyond the live bytes are, when the most is live.
std::string explain_waste(Arena& arena, const AllocTrace& trace) {
  Ours ours{arena};
  TraceReplay<Ours> replay(trace, ours);
  replay.run_until_live(trace.live_high_bytes());
  ArenaStats before = arena.stats();
  double mb = 1e6;
  auto live = static_cast<double>(replay.live_bytes());
  auto committed = static_cast<double>(before.committed_bytes);
  auto free_pages = static_cast<double>(arena.trim());
  double rounding = static_cast<double>(before.live_bytes) - live;
  return strf(
      ",\"at_peak\":{\"waste_mb\":%.1f,\"free_pages_mb\":%.1f,"
      "\"class_rounding_mb\":%.1f,\"cached_mb\":%.1f,"
      "\"holes_mb\":%.1f}",
      (committed - live) / mb, free_pages / mb, rounding / mb,
      static_cast<double>(before.cached_bytes) / mb,
      (committed - live - free_pages - rounding -
       static_cast<double>(before.cached_bytes)) /
          mb);
}

// Huge pages of the process now, as a share of what is resident.
double huge_share() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string line;
  double resident = 0;
  double huge = 0;
  while (std::getline(file, line)) {
    std::sscanf(line.c_str(), "Rss: %lf", &resident);
    std::sscanf(line.c_str(), "AnonHugePages: %lf", &huge);
  }
  return resident > 0 ? huge / resident : 0;
}

int run_one(const std::string& allocator, const std::string& name) {
  AllocTrace trace = load_trace(name);
  std::string json = strf("\"trace\":\"%s\",\"allocator\":\"%s\",",
                          name.c_str(), allocator.c_str());
  if (allocator == "malloc") {
    Malloc heap;
    json += replay_touched(heap, trace);
  } else {
    Arena arena = Arena::create().value();
    Ours heap{arena};
    json += replay_touched(heap, trace);
    json += strf(",\"huge_share\":%.2f", huge_share());
    std::size_t before = proc_kib("VmRSS:");
    arena.trim();
    json += strf(",\"trimmed_mb\":%.1f",
                 static_cast<double>(before - proc_kib("VmRSS:")) / 1e3);
    Arena second = Arena::create().value();
    json += replay_events(second, trace);
    Arena third = Arena::create().value();
    json += explain_waste(third, trace);
  }
  std::printf("{%s}\n", json.c_str());
  return 0;
}

std::string bench_replays(const char* self) {
  std::string json;
  for (const char* trace : kTraces) {
    for (const char* allocator : {"arena", "malloc"}) {
      std::string command = strf("%s --one %s %s", self, allocator, trace);
      std::FILE* pipe = popen(command.c_str(), "r");
      std::array<char, 4096> line{};
      if (pipe == nullptr || !std::fgets(line.data(), line.size(), pipe)) {
        std::fprintf(stderr, "%s gave nothing\n", command.c_str());
        std::exit(1);
      }
      pclose(pipe);
      std::string text(line.data());
      text.erase(text.find_last_not_of('\n') + 1);
      std::printf("%s\n", text.c_str());
      json += (json.empty() ? "" : ",") + text;
    }
  }
  return "\"replays\":[" + json + "]";
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("model name", 0) == 0)
      return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

int run_all(const char* self, std::string_view only) {
#ifdef NDEBUG
  const char* build = "release";
#else
  const char* build = "debug";
  std::printf("WARNING: built with debug checks, times mean nothing\n");
#endif
  std::string cpu = cpu_name();
  std::printf("%s, %u CPUs, %s, %d interleaved rounds\n", cpu.c_str(),
              std::thread::hardware_concurrency(), build, kRounds);
  std::string json = strf("\"bench\":\"alloc\",\"cpu\":\"%s\",\"build\":\"%s\"",
                          cpu.c_str(), build);
  if (only != "--replay") json += "," + bench_small();
  if (only != "--small") json += "," + bench_replays(self);
  std::printf("{%s}\n", json.c_str());
  return 0;
}

}  // namespace
}  // namespace zinf

int main(int argc, char** argv) {
  if (argc == 4 && std::string_view(argv[1]) == "--one") {
    return zinf::run_one(argv[2], argv[3]);
  }
  return zinf::run_all(argv[0], argc > 1 ? argv[1] : "");
}
