// For tests/python/test_comm.py, which loads it with ctypes: groups of torch.
#include <cstddef>
#include <cstdio>
#include <vector>

#include "adapters/torch/c10d_comm.h"
#include "tests/support/comm_suite.h"

namespace {

int tell(const std::string& text, char* message, std::size_t size) {
  std::snprintf(message, size, "%s", text.c_str());
  return text.empty() ? 0 : 1;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Runs the suite. Not 0: `message` says why.
EXPORT int zinf_run_comm_cases(const char* group, char* message,
                               std::size_t size) {
  auto comm = zinf::make_c10d_comm(group);
  if (!comm.ok()) return tell(comm.status().text(), message, size);
  return tell(zinf::run_comm_cases(**comm), message, size);
}

// Waits for a message of another rank, which never comes: the error.
EXPORT int zinf_wait_for_nothing(const char* group, int from, char* message,
                                 std::size_t size) {
  auto comm = zinf::make_c10d_comm(group);
  if (!comm.ok()) return tell(comm.status().text(), message, size);
  std::vector<std::byte> memory(100);
  auto move = (*comm)->receive(from, zinf::Lane::kRequests, memory);
  std::printf("waiting\n");
  std::fflush(stdout);
  return tell(move->wait().text(), message, size);
}
