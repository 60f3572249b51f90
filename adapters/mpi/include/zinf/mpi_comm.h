// A group of the processes that mpirun has started.
#pragma once

#include <memory>

#include "zinf/comm.h"
#include "zinf/status.h"

namespace zinf {

// All processes of MPI_COMM_WORLD call it, each once. Starts MPI unless the
// program has, and then ends it with the process; MPI must allow calls from
// one thread at a time (MPI_THREAD_SERIALIZED): kUnsupported otherwise. MPI's
// calls are made by a thread of its own. When a process dies, mpirun ends the
// others.
Result<std::unique_ptr<Comm>> make_mpi_group();

}  // namespace zinf
