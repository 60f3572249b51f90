// How near the Adam update is to the speed of memory.
//
// Each case runs in pairs with a loop that moves the same bytes (reads and
// writes the same buffers with hardly any arithmetic) on the same threads; the
// ratio of every pair counts, so that a busy machine disturbs both sides alike.
// Buffers are larger than the caches and ask for huge pages.
//
//   adam_bench [--elems N] [--threads N] [--pairs N]
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "src/base/align.h"
#include "src/base/check.h"
#include "src/optim/adam_with.h"
#include "zinf/adam.h"
#include "zinf/cast.h"
#include "zinf/thread_pool.h"

namespace zinf {
namespace {

// Zeroed memory on huge pages; lives until the program ends.
template <typename T>
T* allocate(std::size_t count) {
  std::size_t bytes = align_up(count * sizeof(T), kHugePage);
  void* raw = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ZINF_CHECK(raw != MAP_FAILED, "no memory for %zu bytes", bytes);
  auto address = align_up(reinterpret_cast<std::uintptr_t>(raw), kHugePage);
  void* aligned = reinterpret_cast<void*>(address);
  madvise(aligned, bytes, MADV_HUGEPAGE);
  std::memset(aligned, 0, bytes);
  return static_cast<T*>(aligned);
}

struct Memory {
  explicit Memory(std::size_t elems)
      : count(elems),
        grad(allocate<float>(elems)),
        weight(allocate<float>(elems)),
        exp_avg(allocate<float>(elems)),
        exp_avg_sq(allocate<float>(elems)),
        grad16(allocate<std::uint16_t>(elems)),
        weight16(allocate<std::uint16_t>(elems)),
        low(allocate<std::uint16_t>(elems)) {
    std::uint32_t state = 1;
    for (std::size_t i = 0; i < elems; ++i) {
      state = state * 1664525U + 1013904223U;
      float value = static_cast<float>(state >> 8) * 0x1p-24F - 0.5F;
      grad[i] = value * 1e-2F;
      weight[i] = -value;
    }
    narrow(grad, Dtype::kBFloat16, grad16, elems);
    split_master(weight, weight16, low, elems);
  }

  AdamBuffers fp32() const {
    return {.count = count,
            .grad = grad,
            .weight = weight,
            .exp_avg = exp_avg,
            .exp_avg_sq = exp_avg_sq};
  }

  AdamBuffers mixed() const {
    AdamBuffers buffers = fp32();
    buffers.grad_dtype = Dtype::kBFloat16;
    buffers.grad = grad16;
    buffers.weight_dtype = Dtype::kBFloat16;
    buffers.weight = weight16;
    buffers.master = weight;
    return buffers;
  }

  AdamBuffers split() const {
    AdamBuffers buffers = mixed();
    buffers.master = nullptr;
    buffers.low = low;
    return buffers;
  }

  std::size_t count;
  float* grad;
  float* weight;
  float* exp_avg;
  float* exp_avg_sq;
  std::uint16_t* grad16;
  std::uint16_t* weight16;
  std::uint16_t* low;
};

float step_down(float x, float g) { return x * 0.999F + g * 0.001F; }

// The loops that only move the bytes: 28, 28 and 26 per element.
void move_fp32(const float* __restrict grad, float* __restrict weight,
               float* __restrict m, float* __restrict v, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    float g = grad[i];
    weight[i] = step_down(weight[i], g);
    m[i] = step_down(m[i], g);
    v[i] = step_down(v[i], g);
  }
}

void move_mixed(const std::uint16_t* __restrict grad,
                std::uint16_t* __restrict weight, float* __restrict master,
                float* __restrict m, float* __restrict v, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    float g = std::bit_cast<float>(std::uint32_t{grad[i]} << 16);
    master[i] = step_down(master[i], g);
    m[i] = step_down(m[i], g);
    v[i] = step_down(v[i], g);
    weight[i] =
        static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(m[i]) >> 16);
  }
}

void move_split(const std::uint16_t* __restrict grad,
                std::uint16_t* __restrict weight, std::uint16_t* __restrict low,
                float* __restrict m, float* __restrict v, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    float g = std::bit_cast<float>(std::uint32_t{grad[i]} << 16);
    m[i] = step_down(m[i], g);
    v[i] = step_down(v[i], g);
    weight[i] = static_cast<std::uint16_t>(weight[i] ^ grad[i]);
    low[i] = static_cast<std::uint16_t>(low[i] ^ grad[i]);
  }
}

double seconds(const std::function<void()>& work) {
  auto start = std::chrono::steady_clock::now();
  work();
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return took.count();
}

struct Case {
  const char* name;
  int bytes_per_elem;
  std::function<void()> limit;
  std::function<void()> ours;
};

struct Spread {
  double low, median, high;  // first quartile, median, third quartile
};

Spread spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  std::size_t last = values.size() - 1;
  return {values[last / 4], values[last / 2], values[last - last / 4]};
}

struct Timing {
  Spread limit_ns, ours_ns, ratio;
};

Timing time_case(const Case& one, std::size_t elems, int pairs) {
  std::vector<double> limit;
  std::vector<double> ours;
  std::vector<double> ratio;
  one.limit();
  one.ours();
  for (int pair = 0; pair < pairs; ++pair) {
    // Alternating order, so that neither side always comes after the other.
    double first = seconds(pair % 2 == 0 ? one.limit : one.ours);
    double second = seconds(pair % 2 == 0 ? one.ours : one.limit);
    if (pair % 2 != 0) std::swap(first, second);
    double per_elem = 1e9 / static_cast<double>(elems);
    limit.push_back(first * per_elem);
    ours.push_back(second * per_elem);
    ratio.push_back(second / first);
  }
  return {spread(limit), spread(ours), spread(ratio)};
}

void must(const Status& status) {
  ZINF_CHECK(status.ok(), "%s", status.text().c_str());
}

std::vector<Case> make_cases(const Memory& memory, std::span<double> sums,
                             ThreadPool& pool) {
  static constexpr AdamStep kStep = {
      .step = 10, .inverse_scale = 0.5F, .clip = 0.9F};
  auto ours = [&pool](AdamBuffers buffers) {
    return [&pool, buffers] { must(adam_update({}, kStep, buffers, &pool)); };
  };
  auto over = [&memory, &pool](auto move) {
    return [&memory, &pool, move] {
      pool.run(memory.count, kSumBlock,
               [&](std::size_t b, std::size_t e) { move(memory, b, e - b); });
    };
  };
  auto limit_fp32 = over([](const Memory& m, std::size_t i, std::size_t n) {
    move_fp32(m.grad + i, m.weight + i, m.exp_avg + i, m.exp_avg_sq + i, n);
  });
  auto limit_mixed = over([](const Memory& m, std::size_t i, std::size_t n) {
    move_mixed(m.grad16 + i, m.weight16 + i, m.weight + i, m.exp_avg + i,
               m.exp_avg_sq + i, n);
  });
  auto limit_split = over([](const Memory& m, std::size_t i, std::size_t n) {
    move_split(m.grad16 + i, m.weight16 + i, m.low + i, m.exp_avg + i,
               m.exp_avg_sq + i, n);
  });
  AdamBuffers mixed_with_sums = memory.mixed();
  mixed_with_sums.block_sums = sums;
  return {
      {"fp32", 28, limit_fp32, ours(memory.fp32())},
      {"bf16_master", 28, limit_mixed, ours(memory.mixed())},
      {"bf16_master_sums", 28, limit_mixed, ours(mixed_with_sums)},
      {"bf16_split", 26, limit_split, ours(memory.split())},
  };
}

// A wrong kernel may be fast: the chosen one must equal the baseline.
void verify() {
  constexpr std::size_t kCount = 10'007;
  Memory best(kCount);
  Memory baseline(kCount);
  must(adam_update({}, {}, best.mixed()));
  must(adam_update_with(Isa::kBaseline, {}, {}, baseline.mixed(), nullptr));
  ZINF_CHECK(std::memcmp(best.weight, baseline.weight, kCount * 4) == 0 &&
                 std::memcmp(best.weight16, baseline.weight16, kCount * 2) == 0,
             "%s and baseline differ", isa_name(best_isa()));
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

struct Arguments {
  std::size_t elems = std::size_t{64} << 20;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  int pairs = 9;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i + 1 < argc; i += 2) {
    std::string name = argv[i];
    long value = std::atol(argv[i + 1]);
    ZINF_CHECK(value > 0, "%s needs a positive number", name.c_str());
    if (name == "--elems") {
      arguments.elems = static_cast<std::size_t>(value);
    } else if (name == "--threads") {
      arguments.threads = static_cast<int>(value);
    } else if (name == "--pairs") {
      arguments.pairs = static_cast<int>(value);
    } else {
      ZINF_CHECK(false, "unknown argument %s", name.c_str());
    }
  }
  return arguments;
}

void run(const Arguments& arguments) {
  std::printf("CPU %s, %d threads, %s, %s build, %zu elements, %d pairs\n",
              cpu_name().c_str(), arguments.threads, isa_name(best_isa()),
              ZINF_BUILD_TYPE, arguments.elems, arguments.pairs);
#ifndef NDEBUG
  std::printf("WARNING: assertions are on; use the release preset\n");
#endif
  verify();
  Memory memory(arguments.elems);
  std::vector<double> sums(num_sum_blocks(arguments.elems));
  std::unique_ptr<ThreadPool> pool =
      ThreadPool::create(arguments.threads).value();
  std::printf("%-18s %27s %27s %23s\n", "medians (quartiles)", "memory ns/elem",
              "zinf ns/elem", "ratio");
  std::string json;
  for (const Case& one : make_cases(memory, sums, *pool)) {
    Timing t = time_case(one, arguments.elems, arguments.pairs);
    std::printf(
        "%-18s %7.3f (%.3f..%.3f) %5.1f GB/s %7.3f (%.3f..%.3f) "
        "%6.3f (%.3f..%.3f)\n",
        one.name, t.limit_ns.median, t.limit_ns.low, t.limit_ns.high,
        one.bytes_per_elem / t.limit_ns.median, t.ours_ns.median, t.ours_ns.low,
        t.ours_ns.high, t.ratio.median, t.ratio.low, t.ratio.high);
    char text[200];
    std::snprintf(text, sizeof text,
                  ",\"%s\":{\"memory_ns\":%.4f,\"zinf_ns\":%.4f,"
                  "\"ratio\":%.4f,\"ratio_q1\":%.4f,\"ratio_q3\":%.4f}",
                  one.name, t.limit_ns.median, t.ours_ns.median, t.ratio.median,
                  t.ratio.low, t.ratio.high);
    json += text;
  }
  std::printf(
      "{\"bench\":\"adam\",\"cpu\":\"%s\",\"build\":\"%s\",\"isa\":\"%s\","
      "\"threads\":%d,\"elems\":%zu,\"pairs\":%d%s}\n",
      cpu_name().c_str(), ZINF_BUILD_TYPE, isa_name(best_isa()),
      arguments.threads, arguments.elems, arguments.pairs, json.c_str());
}

}  // namespace
}  // namespace zinf

int main(int argc, char** argv) { zinf::run(zinf::parse(argc, argv)); }
