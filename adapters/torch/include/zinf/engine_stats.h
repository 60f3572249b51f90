#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace zinf {

// Counts and bytes of one engine so far. After close(), of its last moment.
struct EngineStats {
  std::uint64_t managed = 0;         // units under management
  std::uint64_t weights_bytes = 0;   // of those that are weights
  std::uint64_t resident_bytes = 0;  // of units in memory
  std::uint64_t peak_resident_bytes = 0;
  std::uint64_t device_resident_bytes = 0;
  std::uint64_t device_peak_resident_bytes = 0;
  std::uint64_t device_bytes_in = 0;  // over its link to the host, ever
  std::uint64_t device_bytes_out = 0;
  std::uint64_t reads = 0;  // moves from NVMe, and their bytes
  std::uint64_t writes = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t fetches = 0;  // reads that began when somebody needed them
  std::uint64_t late = 0;     // reads that were not over when they were needed
  std::uint64_t drops = 0;    // units that left memory
  std::uint64_t nvme_bytes = 0;  // of the files on NVMe
  // What NVMe has reached while it was busy.
  double nvme_read_bytes_per_second = 0;
  double nvme_write_bytes_per_second = 0;
  // What `zinf io tune` measured there; 0 where it has not run.
  double nvme_tuned_read_bytes_per_second = 0;
  double nvme_tuned_write_bytes_per_second = 0;
  double nvme_cpu_seconds = 0;      // of the threads that talk to the disks
  std::uint64_t nvme_requests = 0;  // transfers, neighbours joined
  // Bytes hashed to verify what comes back from NVMe, written and read, and
  // the CPU time of all threads for it.
  std::uint64_t nvme_checksum_bytes = 0;
  double nvme_checksum_cpu_seconds = 0;
  // Of the whole process.
  std::uint64_t updated_parameters = 0;
  double update_cpu_seconds = 0;
  // Of the last step. Waits are in sum, for reads and for memory that writes
  // had to free; the rest of the time is compute.
  double step_seconds = 0;
  double step_compute_seconds = 0;
  double step_read_wait_seconds = 0;
  double step_write_wait_seconds = 0;
  std::uint64_t step_bytes_read = 0;
  std::uint64_t step_bytes_written = 0;
  double step_prefetched = 0;  // the share of reads that nobody waited for
  std::vector<std::pair<std::string, double>> step_waits;  // the longest five
  // Plans of moves: how often uses came other than expected, and the time that
  // planning took, in all.
  std::uint64_t deviations = 0;
  double plan_seconds = 0;
  // What the last plan expects of a step.
  double planned_step_seconds = 0;
  std::uint64_t planned_step_bytes = 0;
  // Wear. The rates are those since the first step's end; a life is
  // nvme_endurance_bytes written, 1 is all of it.
  std::uint64_t steps = 0;  // of optimizers
  std::uint64_t nvme_write_bytes_per_step = 0;
  double nvme_write_tb_per_day = 0;
  std::uint64_t nvme_endurance_bytes = 0;  // what the drives are rated for
  double nvme_life_per_day = 0;
  double nvme_life_per_year = 0;
  // host_memory, and what tensors and states of the process hold of it. Peaks
  // are those since the engine was made.
  std::uint64_t host_limit_bytes = 0;
  std::uint64_t host_used_bytes = 0;
  std::uint64_t host_peak_bytes = 0;
  std::uint64_t host_peak_activation_bytes = 0;  // of tensors
  std::uint64_t host_peak_unit_bytes = 0;        // of units and their buffers
  std::uint64_t updates_waiting = 0;             // that step() has put off
  std::uint64_t intercepted = 0;  // operators on units, of the whole process
  std::uint64_t escapes = 0;      // raw pointers that were taken
  std::uint64_t faults = 0;       // reads that a fault has served
  std::uint64_t audit_violations = 0;  // what audit has found
  std::uint64_t undeclared_writes = 0;
  // Several ranks: what went between this one and others, with the headers of
  // messages; wholes in memory above the slices; waits for these.
  int rank = 0;
  int ranks = 1;
  std::uint64_t weights_bytes_sent = 0;
  std::uint64_t weights_bytes_received = 0;
  std::uint64_t grads_bytes_sent = 0;
  std::uint64_t grads_bytes_received = 0;
  std::uint64_t between_groups_bytes_sent = 0;  // gradients of replicas
  std::uint64_t between_groups_bytes_received = 0;
  std::uint64_t gathered_bytes = 0;
  std::uint64_t peak_gathered_bytes = 0;
  double gather_wait_seconds = 0;
};

}  // namespace zinf
