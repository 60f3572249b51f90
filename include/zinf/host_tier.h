// The host's memory of one engine, with what is below it.
//
// A scratch store on NVMe that grows as states come, and the Residency that
// stands above it, in the memory of the process. Placement follows from the
// role of a state and the options; torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zinf/host_memory.h"
#include "zinf/nvme_path.h"
#include "zinf/residency.h"
#include "zinf/status.h"
#include "zinf/trace.h"

namespace zinf {

// Where the user wants states of a role.
enum class Where : std::uint8_t {
  kAuto,  // in memory while it fits, below otherwise
  kHost,
  kNvme,
};

enum class Role : std::uint8_t {
  kWeight,
  kState,  // the optimizer's
  kGrad,
};
std::string_view role_name(Role role);

struct HostTierOptions {
  std::vector<NvmePath> nvme = {};  // a private directory is made in each
  Where weights = Where::kAuto;     // and gradients
  Where states = Where::kAuto;
  // Of what is to live on NVMe, so much may be in memory unused: see
  // ResidencyOptions::away_limit_bytes.
  std::uint64_t away_bytes = 0;
  // Whether states are moved ahead of their uses.
  bool prefetch = true;
  // What the drives behind `nvme` are rated for (TBW); 0: by their size.
  std::uint64_t endurance_bytes = 0;

  Where where(Role role) const;

  // kInvalid with every problem in one text.
  Status validate() const;
};

// What the steps so far mean for the drives.
struct WearStats {
  std::uint64_t steps = 0;
  std::uint64_t bytes_per_step = 0;
  double tb_per_day = 0;  // at this rate: 0 before the second step
  // Shares of what the drives are rated for: 1 is all of it.
  double life_per_day = 0;
  double life_per_year = 0;
  std::uint64_t endurance_bytes = 0;
};

// How moves ahead of uses went.
struct MoverStats {
  std::uint64_t steps = 0;
  std::uint64_t deviations = 0;  // uses that were not expected where they came
  double plan_seconds = 0;       // for making plans, in all
  // What the last plan expects of a step.
  double forecast_seconds = 0;
  std::uint64_t forecast_bytes = 0;
};

// The last step, from the end of the one before: where its time went, and what
// was moved. All zero after the first.
struct StepStats {
  double seconds = 0;
  double read_wait_seconds = 0;   // for what was not there yet
  double write_wait_seconds = 0;  // for memory, and for writes under way
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t reads = 0;
  std::uint64_t fetches = 0;  // of reads: nobody had started them before
  std::uint64_t late = 0;     // of reads: started before, and not over in time
  std::vector<StateWait> waits;  // the longest
};

struct DiskSpeed {
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
};

struct HostTierStats {
  ResidencyStats residency;
  WearStats wear;
  MoverStats mover;
  StepStats step;
  std::uint64_t nvme_bytes = 0;  // of the scratch store's files
  DiskSpeed nvme;                // while it was busy
  DiskSpeed tuned;  // what `zinf io tune` measured; 0 where it has not run
  double io_cpu_seconds = 0;  // of the threads behind NVMe
  std::uint64_t io_requests = 0;
  // What was hashed to verify NVMe, and the CPU time of all threads for it.
  std::uint64_t checksum_bytes = 0;
  double checksum_seconds = 0;
  BudgetUsage host;  // of the process, the most of it since this tier was made
  // The most that was seen of memory in use that is not this tier's.
  std::uint64_t others_high_bytes = 0;
};

// Thread-safe.
class HostTier {
 public:
  // `leaving` as in ResidencyOptions.
  static Result<std::shared_ptr<HostTier>> create(
      std::shared_ptr<HostMemory> memory, const HostTierOptions& options,
      AskLeave leaving);
  ~HostTier();
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  Result<StateRef> add(const StateSpec& spec, Role role, void* owner);
  Home home_of(Role role) const;

  // States that are used at once, before they are pinned: what is moved ahead
  // of uses depends on these, nothing else does.
  void announce(std::span<const StateUse> at_once);

  // Makes room on NVMe for so much in all, never less than now; kNoSpace with
  // what is needed and found. Without NVMe there is nothing to do.
  Status reserve(std::uint64_t bytes, std::size_t num_states);

  // Looks how much memory others use, and that they are about to take: at a
  // moment when it may be much.
  void note_others(std::uint64_t more_bytes = 0);

  // Whether work that needs so many bytes at once may wait for the next pass:
  // it gains something where states move, and it must fit beside the most that
  // others ever had.
  bool may_wait(std::uint64_t bytes) const;
  // Whether so many bytes hardly fit beside what others have now.
  bool is_short_of(std::uint64_t bytes) const;

  // As HostMemory's; what is noted meanwhile is forgotten.
  void start_measuring(std::uint64_t most_bytes);
  std::uint64_t stop_measuring();

  // An optimizer's step has ended: see StepStats and WearStats. What was
  // announced since the last one is the step's trace.
  void count_step();
  // Nothing is moved ahead any more.
  void rest();
  // Whether this is a thread of some engine's own, which moves states ahead or
  // serves other ranks: it calls `leaving` too.
  static bool on_own_thread();

  // For measurements of what verification costs: see Store::set_verify(). The
  // tier starts with Verify::kAlways. Without NVMe there is nothing to do.
  void set_verify(Verify verify);

  Residency& residency();
  HostMemory& memory();
  const HostTierOptions& options() const;
  HostTierStats stats() const;

 private:
  HostTier() = default;
  // Of the memory in use, what is not this tier's.
  std::uint64_t others_bytes(const BudgetUsage& usage) const;
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace zinf
