// Updates that step() has put off.
//
// Note [Later]: where states come from a disk, step() would have to wait for
// all of them, one after the other, while nothing is computed. So it puts
// updates off: each is done when something that it concerns is used, the
// weight, its gradient or its states. Mostly that is the next forward pass, and
// the states arrive while the layers before are computed. Whoever pins a unit
// settles what was put off for it first, so nobody can tell the difference; but
// an error of an update shows up there, and the engine is not used after it
// until a good state is loaded.
//
// What takes much of the budget, or would not fit beside the activations, is
// not put off; when activations grow more than ever before, all that waits is
// done while it fits.
//
// Where weights are on a device and states on the host, updates are put off
// whatever they take, also inside backward, and a thread makes them
// (update_queue.h): the host waits for no gradient while there is more to
// compute. The gradient goes to the host as soon as it is complete, the weight
// is changed in the host's memory, and what the device has of it is dropped
// before: it comes back when it is used, or at once where there is room for
// everything.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "adapters/torch/adam.h"
#include "zinf/thread_pool.h"

namespace zinf {

class Manager;

// The thread pool of updates: one for the process, with as many threads as
// torch has now.
std::shared_ptr<ThreadPool> update_pool();

// Thread-safe. Belongs to the weight's unit; the others know it weakly, and it
// does not keep the weight.
class LaterUpdate : public std::enable_shared_from_this<LaterUpdate> {
 public:
  // Null: it cannot wait, and the caller has to do it. On a device so many
  // tensors have the gradient's storage, at most.
  static std::shared_ptr<LaterUpdate> put_off(const AdamOptions& options,
                                              const AdamStep& step,
                                              const AdamItem& item,
                                              std::size_t users = 1);
  ~LaterUpdate();

  // Does it, unless it was done or its weight is gone. A thread that comes
  // meanwhile waits; the one that is at it comes through, with false. Throws
  // what it meets: after kOverBudget it waits on, after anything else its
  // manager has failed.
  bool run();
  // Of a weight on a device: what it needs goes to the host, or comes there.
  void prepare();
  // Forgets it: other content takes the place of all that it would change.
  void abandon();

  std::uint64_t bytes() const { return bytes_; }  // in memory, while it is done
  bool over() const { return over_; }
  static bool running_here();  // whether this thread is in run()

 private:
  LaterUpdate(const AdamOptions& options, const AdamStep& step,
              const AdamItem& item, std::uint64_t bytes,
              std::shared_ptr<Manager> manager);
  at::Tensor weight() const;  // undefined when it is gone
  void update(const at::Tensor& weight);

  const AdamOptions options_;
  const AdamStep step_;
  const std::shared_ptr<Manager> manager_;
  const std::shared_ptr<ThreadPool> pool_;
  const std::uint64_t bytes_;
  // The weight, without a reference.
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const std::vector<std::int64_t> sizes_;
  const std::vector<std::int64_t> strides_;
  const std::int64_t offset_;
  const c10::DispatchKeySet keys_;
  const at::ScalarType dtype_;

  // The item as it was, for the caller to let go of without a lock: that may
  // need the GIL.
  std::optional<AdamItem> end();

  std::atomic<std::thread::id> runner_ = {};
  std::atomic<bool> over_ = false;
  std::mutex mutex_;              // held while it is done
  std::optional<AdamItem> item_;  // without the weight; none when it is over
};

}  // namespace zinf
