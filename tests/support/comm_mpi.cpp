// mpirun -np N comm_mpi: the suite of every group, on MPI's.
#include <cstdio>

#include "tests/support/comm_suite.h"
#include "zinf/mpi_comm.h"

int main() {
  auto comm = zinf::make_mpi_group();
  if (!comm.ok()) {
    std::fprintf(stderr, "%s\n", comm.status().text().c_str());
    return 1;
  }
  const std::string why = zinf::run_comm_cases(**comm);
  if (!why.empty()) std::fprintf(stderr, "%s\n", why.c_str());
  if (why.empty() && (*comm)->rank() == 0) {
    std::printf("%zu cases passed on %d ranks\n", zinf::comm_cases().size(),
                (*comm)->size());
  }
  return why.empty() ? 0 : 1;
}
