// Run by every rank under mpirun: seconds that MPI takes for what a step of
// ZeRO-3 moves; the first rank prints them, as bench/e2e/gloo_alone.py does.
//   mpirun -np 2 mpi_alone BYTES
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "zinf/collectives.h"
#include "zinf/mpi_comm.h"

namespace {

using zinf::Comm;

zinf::Status step(Comm& comm, std::vector<float>& whole,
                  std::vector<float>& part) {
  const auto own = std::as_bytes(std::span(part));
  const auto all = std::as_writable_bytes(std::span(whole));
  ZINF_TRY(zinf::all_gather(comm, own, all)->wait());
  ZINF_TRY(zinf::all_gather(comm, own, all)->wait());
  return zinf::reduce_scatter(comm, whole, part)->wait();
}

zinf::Status measure(Comm& comm, std::size_t bytes) {
  constexpr int kSteps = 8;  // the first one is not counted
  const auto ranks = static_cast<std::size_t>(comm.size());
  std::vector<float> part(bytes / sizeof(float) / ranks);
  std::vector<float> whole(part.size() * ranks);
  std::vector<double> seconds;
  for (int i = 0; i < kSteps; ++i) {
    ZINF_TRY(zinf::barrier(comm)->wait());
    const auto begin = std::chrono::steady_clock::now();
    ZINF_TRY(step(comm, whole, part));
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - begin;
    if (i > 0) seconds.push_back(took.count());
  }
  std::ranges::sort(seconds);
  if (comm.rank() == 0) {
    std::printf("%.2f (%.2f-%.2f)\n", seconds[seconds.size() / 2],
                seconds.front(), seconds.back());
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: mpirun -np RANKS mpi_alone BYTES\n");
    return 2;
  }
  auto comm = zinf::make_mpi_group();
  zinf::Status status = comm.status();
  if (status.ok())
    status = measure(**comm, std::strtoull(argv[1], nullptr, 10));
  if (status.ok()) return 0;
  std::fprintf(stderr, "mpi_alone: %s\n", status.text().c_str());
  return 1;
}
