// What an engine does where a model is split over ranks.
//
// Note [Passes of ranks]: every backward pass, and every step() that uses
// gradients which are there after backward, is a pass of the exchange
// (zinf/exchange.h): it ends on a rank when all ranks have ended theirs. So
// ranks are at most a pass apart, and between passes they may do what they
// like.
//
//   backward: gradients go to the keepers of their slices as they are complete
//     (reduce()), and are summed there in the order of ranks. At its end every
//     parameter that had a gradient on some rank has `p.grad`, the average: a
//     whole above the slices, which is gathered only when somebody looks.
//   update="backward": the keeper updates its slice as soon as the sum is
//     there, on the thread that runs backward; there is no `p.grad`.
//   step(): when all ranks are there, nobody reads the old weights any more;
//     each updates its slices.
//
// A rank that reads a slice which is to be updated waits for that.
//
// Note [Groups]: with partition_group=G every G ranks in a row have the whole
// model among them, and groups are replicas: gathering stays inside a group. At
// the end of a pass the ranks that keep the same slices add up their groups'
// sums, in the order of groups. Then all of it goes on as above, in every group
// by itself.
//
// Note [World]: with deterministic="world" the bits do not depend on the number
// of ranks. Micro-batch i of a step is that of rank i mod N in its pass i div
// N, and the gradients of a step are summed as a tree over i would
// (tree_sum.h). Parts come in the order of i, so a keeper holds one sum per
// level until the last pass, which is the one that updates. N is a power of
// two, so the average is exact whatever N is.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adapters/torch/shard.h"
#include "zinf/comm.h"
#include "zinf/gather_tier.h"

namespace zinf {

class Manager;

struct RanksOptions {
  // What is split: 1 the optimizer's states, 2 gradients too, 3 weights too.
  int stage = 3;
  bool evict_always = false;
  bool prefetch = true;
  bool world = false;       // see Note [World]
  int partition_group = 0;  // see Note [Groups]; 0: all ranks are one
};

struct RanksStats {
  int rank = 0;
  int ranks = 1;
  CommStats traffic;
  CommStats between_groups;  // of this
  std::uint64_t passes = 0;
  std::uint64_t wholes_bytes = 0;  // in memory now
  std::uint64_t wholes_high_bytes = 0;
  double wait_seconds = 0;  // for gathering
};

// Thread-safe. The manager must outlive it.
class Ranks {
 public:
  static Result<std::unique_ptr<Ranks>> create(Manager& manager,
                                               std::shared_ptr<Comm> comm,
                                               const RanksOptions& options,
                                               AskLeave leaving);
  ~Ranks();

  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }
  // How many slices there are of everything, and which is this rank's.
  int num_slices() const { return group_->size(); }
  int slice() const { return group_->rank(); }
  Residency& residency() { return gather_->residency(); }
  GatherTier& gather() { return *gather_; }

  // A parameter becomes split. In the same order on all ranks. Throws when it
  // cannot be.
  std::shared_ptr<Shard> add(const at::Tensor& parameter,
                             const std::string& name);
  // The parameter has ended here.
  void drop(const Shard& shard);
  // Its gradient is dropped here.
  void drop_gradient(Shard& shard);

  // A whole is about to be changed by who has it pinned.
  void announce_change(std::uint32_t unit);

  // A backward pass is about to accumulate a gradient of the parameter; inside
  // backward. What is there already is put aside.
  void before_gradient(const at::Tensor& parameter);
  // The gradient of this pass is in `p.grad`: it goes to the keepers. `passes`:
  // how many an optimizer has announced, which updates in the last of them;
  // 0 where nobody has.
  void reduce(const at::Tensor& parameter, std::int64_t passes);
  // In this pass, gradients are used by this at once: it updates the slices of
  // those parameters, on the thread that runs backward.
  // `how` tells the options of the optimizer, which all ranks must have alike.
  using Update = std::function<void(const std::vector<at::Tensor>&)>;
  void update_inside(Update update, const std::function<std::string()>& how);
  // A step has so many passes: those that had no gradient for this rank are
  // made up for. `update` is for the last of them.
  void make_up_passes(std::uint64_t count, const Update& update,
                      const std::string& how);
  // With Note [World]: the passes since the last step count for nothing.
  void forget_sums();

  // Around the updates of step(); waits until all ranks are there.
  void begin_step(const std::vector<at::Tensor>& due, const std::string& how);
  void end_step(const std::vector<at::Tensor>& updated);
  // An optimizer's step is over, with updates or without.
  void count_step() { since_step_ = 0; }

  // Waits until all ranks are there, for the same: a rank that trains on
  // meanwhile is an error on all, and so is one that does not come for so many
  // seconds. Before that, a warning names it.
  void meet(const std::string& what, double seconds);

  // Keeps all changes of wholes in the slices.
  void flush();
  // Somebody has changed the slices of these.
  void outdate(const std::vector<at::Tensor>& parameters);

  // The sum over all ranks, or over those that have all slices among them: each
  // rank calls it, and gets the same.
  double sum(double value);
  double sum_over_slices(double value);
  // What rank 0 has.
  void broadcast(std::span<std::byte> content);

  // Serves others until they have ended too. The error of a failed group.
  Status finish();
  void fail(const Status& why);
  RanksStats stats();

 private:
  class Pass;
  struct Sent {
    at::Tensor grad;
    Pin pin;  // of one that was on a device
    std::unique_ptr<Move> move;
  };

  Ranks(Manager& manager, std::shared_ptr<Comm> comm,
        const RanksOptions& options);

  std::shared_ptr<Shard> shard_of_unit(std::uint32_t unit);
  // Of the tier, on its threads.
  Status keep(std::uint32_t unit, std::span<const std::byte> slice);
  Status settle(std::uint32_t unit, std::uint64_t passes);
  Status add_part(const PartName& part, std::span<const std::byte> bytes);
  Status take(std::uint32_t unit);
  void forget(std::uint32_t unit);

  int num_groups() const { return size() / num_slices(); }
  // Of a gradient's sum, with what makes it divisible by groups.
  std::int64_t sum_elements(const Shard& shard) const;
  // Adds up the sums of groups; of the units of this group those of all become.
  void sum_groups(std::vector<std::uint32_t>& units);
  std::uint64_t hash_of_units();
  void compare_groups();
  // Throws where groups have changed a unit differently.
  void compare_contents(const std::vector<std::uint64_t>& own);
  void wait_between_groups(Move& move);
  void sum_group(Shard& shard);
  void mark_all_due(bool due);

  void wait_for_all(const std::string& what, double seconds);

  void make_up_pass(Update update, const std::string& how);
  void enter_pass();
  void check_device(const at::Tensor& parameter);
  void end_thread();  // of the pass
  void leave_pass();  // all of it went well
  void end_pass();
  void put_back();
  void abandon_pass();
  void send(Shard& shard, const at::Tensor& parameter, const at::Tensor& grad);
  void send_from_device(const std::shared_ptr<Shard>& shard, at::Tensor grad);
  void send_next();  // of leaving_
  void wait_for_sent(std::uint64_t most_bytes);
  // Updates what has come.
  void update_ready();
  // At the end of the pass that updates.
  void update_complete(const std::shared_ptr<Shard>& shard);
  void set_gradient(const std::shared_ptr<Shard>& shard);
  // The sum of what was taken becomes the gradient.
  void average_sum(Shard& shard);
  void make_ready(const std::shared_ptr<Shard>& shard);
  // What was `p.grad` and is kept by somebody becomes a tensor of its own.
  void release_kept(Shard& shard);
  std::vector<std::shared_ptr<Shard>> shards();
  // What was changed through addresses that were given out is announced.
  void look_for_edits();
  void close(const std::string& what);
  // All ranks have closed this one.
  void count_pass();
  // Tells all ranks, and throws.
  [[noreturn]] void refuse_pass(const std::string& why);
  void throw_if_failed(const Status& status);

  Manager& manager_;
  const std::shared_ptr<Comm> comm_;
  const bool world_;
  std::shared_ptr<Comm> group_;       // who has all slices
  std::unique_ptr<Comm> same_slice_;  // one of each group; null: one group
  std::unique_ptr<GatherTier> gather_;

  mutable std::mutex mutex_;  // for what follows
  std::condition_variable changed_;
  std::map<std::uint32_t, std::shared_ptr<Shard>> shards_;  // by both units

  // Of the pass that is under way; on the thread that runs backward.
  std::weak_ptr<Pass> pass_;
  std::set<std::shared_ptr<Shard>> seen_;  // whose gradient is about to come
  std::set<std::shared_ptr<Shard>> reduced_;
  std::map<std::shared_ptr<Shard>, at::Tensor> aside_;  // gradients until then
  // With Note [World]: whose gradients this step has, of any rank.
  std::set<std::shared_ptr<Shard>> waiting_;
  // On their way from a device to the host.
  std::deque<std::pair<std::shared_ptr<Shard>, at::Tensor>> leaving_;
  std::deque<Sent> sent_;
  std::uint64_t sent_bytes_ = 0;
  Update update_;
  std::string how_;                  // of update_
  std::vector<at::Tensor> updated_;  // parameters
  // Sums that are there and wait for update_; under mutex_.
  std::deque<std::shared_ptr<Shard>> ready_;
  std::atomic<bool> updates_ = false;          // whether update_ is there
  std::atomic<std::uint64_t> number_ = 0;      // passes that were closed here
  std::atomic<std::uint64_t> since_step_ = 0;  // of these
  std::atomic<std::uint64_t> step_begin_ = 0;  // the first of this step
  // That makes updates: it does not wait for them.
  std::atomic<std::thread::id> updater_ = {};
  static constexpr int kNoDevice = -1;
  std::atomic<int> pass_device_ = kNoDevice;  // the type of its device
};

}  // namespace zinf
