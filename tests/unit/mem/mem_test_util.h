// What the tests of src/mem share.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "src/base/align.h"
#include "tests/support/sanitized.h"
#include "zinf/arena.h"
#include "zinf/budget.h"

namespace zinf {

// Runs body in a child; true when it returned 0 within a minute. The alarm ends
// a child that hangs on a lock.
template <typename Body>
bool succeeds_in_child(const Body& body) {
  pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body());
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child &&
         WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

inline Budget make_budget(std::uint64_t bytes) {
  return Budget::create("host", bytes).value();
}

inline Arena make_arena(ArenaOptions options = {}) {
  return Arena::create(std::move(options)).value();
}

// Fills a block so that any overlap with another one is noticed: its ends
// wholly, and a word in each page between.
class Pattern {
 public:
  static void write(void* block, std::size_t bytes, std::uint64_t seed) {
    visit(block, bytes, seed, [](std::byte* at, std::byte value) {
      *at = value;
      return true;
    });
  }

  static bool intact(void* block, std::size_t bytes, std::uint64_t seed) {
    return visit(block, bytes, seed,
                 [](std::byte* at, std::byte value) { return *at == value; });
  }

 private:
  template <typename Body>
  static bool visit(void* block, std::size_t bytes, std::uint64_t seed,
                    const Body& body) {
    auto* begin = static_cast<std::byte*>(block);
    for (std::size_t at = 0; at < bytes;
         at += at < 64 || at + 64 >= bytes ? 1 : step(at, bytes)) {
      auto value =
          static_cast<std::byte>((seed + at) * 0x9e3779b97f4a7c15 >> 56);
      if (!body(begin + at, value)) return false;
    }
    return true;
  }
  static std::size_t step(std::size_t at, std::size_t bytes) {
    return std::min<std::size_t>(509, bytes - 64 - at);
  }
};

// Bytes of the range that are in memory.
inline std::size_t resident_bytes(void* begin, std::size_t bytes) {
  std::vector<unsigned char> pages(bytes / kPage);
  if (mincore(begin, bytes, pages.data()) != 0) return 0;
  std::size_t resident = 0;
  for (unsigned char page : pages) resident += (page & 1) * kPage;
  return resident;
}

// The part of [begin, begin + bytes) that is in huge pages.
inline std::size_t huge_bytes_at(const void* begin) {
  std::FILE* file = std::fopen("/proc/self/smaps", "re");
  if (file == nullptr) return 0;
  char line[512];
  std::size_t found = 0;
  bool inside = false;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    unsigned long long low = 0;
    unsigned long long high = 0;
    unsigned long long kib = 0;
    if (std::sscanf(line, "%llx-%llx ", &low, &high) == 2) {
      auto address = reinterpret_cast<std::uintptr_t>(begin);
      inside = low <= address && address < high;
    } else if (inside && std::sscanf(line, "AnonHugePages: %llu", &kib) == 1) {
      found = kib * kKiB;
    }
  }
  std::fclose(file);
  return found;
}

}  // namespace zinf
