// A store that lives as long as one run: made when the first state is written,
// grown when more come. Its files have no names, so they are gone with the
// process, however that ends.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/base/mutex.h"
#include "zinf/disk.h"
#include "zinf/host_tier.h"
#include "zinf/nvme_path.h"
#include "zinf/residency.h"
#include "zinf/store.h"

namespace zinf {

// Thread-safe. Commits nothing: what it holds ends with the process. Every
// read is compared with the checksums of the write: kCorrupt where they differ.
class Scratch final : public Backing {
 public:
  // One file in each of these is made when it is needed.
  explicit Scratch(std::vector<NvmePath> parents);

  // Room for so much in all, never less than now.
  Status reserve(std::uint64_t bytes, std::size_t num_states);
  StoreStats stats() const;  // all zero before the first write
  // What `zinf io tune` found for the parents, in sum: 0 where it has not run.
  DiskSpeed tuned() const;
  void set_verify(Verify verify);  // see Store::set_verify()

  Result<std::uint32_t> add(const StateSpec& spec) override;
  Status remove(std::uint32_t state) override;
  Status discard(std::uint32_t state) override;  // gives its room back too
  bool has_content(std::uint32_t state) const override;
  Status prepare(std::uint32_t state) override;
  std::unique_ptr<Move> read(std::uint32_t state,
                             std::span<std::byte> into) override;
  std::unique_ptr<Move> write(std::uint32_t state,
                              std::span<const std::byte> from) override;
  bool in_background() const override { return true; }
  bool due(std::uint64_t) const override { return false; }
  Status commit(std::uint64_t step) override;
  Status rollback() override;

 private:
  struct State {
    StateSpec spec;
    StateId id{};  // index 0: not in the store yet
  };

  Status undefine(State& state) ZINF_REQUIRES(mutex_);
  // Defines the state in the store; makes or grows the store for it.
  Result<StateId> define(std::uint32_t state) ZINF_REQUIRES(mutex_);
  // For so much in all.
  Status make_room(std::uint64_t bytes, std::size_t num_states)
      ZINF_REQUIRES(mutex_);

  const std::vector<NvmePath> parents_;
  std::vector<std::optional<io::Profile>> profiles_;  // of the parents
  mutable Mutex mutex_;
  std::unique_ptr<Store> store_ ZINF_GUARDED_BY(mutex_);
  Verify verify_ ZINF_GUARDED_BY(mutex_) = Verify::kAlways;
  std::uint64_t room_bytes_ ZINF_GUARDED_BY(mutex_) = 0;
  std::size_t room_states_ ZINF_GUARDED_BY(mutex_) = 0;
  std::uint64_t used_bytes_ ZINF_GUARDED_BY(mutex_) = 0;
  std::size_t used_states_ ZINF_GUARDED_BY(mutex_) = 0;
  std::deque<State> states_ ZINF_GUARDED_BY(mutex_);
  std::vector<std::uint32_t> free_ ZINF_GUARDED_BY(mutex_);
};

}  // namespace zinf
