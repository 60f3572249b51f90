// Reading whole versions to compare their checksums.
#include <algorithm>
#include <deque>
#include <set>

#include "src/base/align.h"
#include "src/tier/store_impl.h"
#include "zinf/log.h"

namespace zinf::tier {
namespace {

constexpr std::size_t kWindow = 4;  // chunks under way
constexpr std::uint64_t kChunk = 4 * kMiB;

// One chunk of a state on its way from the disk.
struct Chunk {
  std::size_t check;    // whose
  std::uint64_t begin;  // of its bytes
  std::unique_ptr<PageBuffer> memory;
  std::vector<io::Request> requests;
};

}  // namespace

struct StoreImpl::Check {
  BlockName name;
  std::shared_ptr<const Placement> place;
  std::shared_ptr<const Checksums> sums;  // null: only whether it can be read
  std::uint64_t bytes;
};

// What versions share is read once, for the first of them.
std::vector<StoreImpl::Check> StoreImpl::checks_of(
    const std::vector<Version>& versions) {
  std::vector<Check> checks;
  std::set<const Placement*> seen;
  MutexLock lock(mutex_);
  for (const Version& version : versions) {
    if (version.table == nullptr) continue;
    for (std::size_t i = 0; i < version.table->size(); ++i) {
      const Entry& entry = (*version.table)[i];
      if (!entry.present || entry.bytes == 0) continue;
      if (!seen.insert(entry.place.get().get()).second) continue;
      checks.push_back({{states_[i].spec.name(), version.info.label()},
                        entry.place.get(),
                        entry.sums,
                        entry.bytes});
    }
  }
  return checks;
}

std::vector<Damage> StoreImpl::run_checks(const std::vector<Check>& checks,
                                          const Store::Progress& progress) {
  std::vector<Damage> damages;
  std::uint64_t total = 0;
  std::uint64_t done = 0;
  for (const Check& check : checks) total += check.bytes;
  std::uint64_t block = shared_->block_bytes();
  std::uint64_t step = std::max(block, align_down(kChunk, block));

  auto finish = [&](Chunk& chunk) {
    const Check& check = checks[chunk.check];
    Status read = io::wait_all(chunk.requests);
    std::uint64_t end = std::min(check.bytes, chunk.begin + step);
    if (!read.ok()) {
      damages.push_back({check.name.version, read.in(check.name.state)});
    }
    for (std::uint64_t at = chunk.begin;
         read.ok() && check.sums != nullptr && at < end; at += block) {
      auto bytes = chunk.memory->span().subspan(
          at - chunk.begin, std::min<std::uint64_t>(block, end - at));
      std::uint64_t got = shared_->sum(bytes);
      std::uint64_t wanted = (*check.sums)[at / block];
      if (got == wanted) continue;
      damages.push_back({check.name.version,
                         check.name.mismatch(*shared_, check.place->pieces,
                                             at / block, wanted, got)});
    }
    done += end - chunk.begin;
    if (progress) progress(done, total);
  };

  std::deque<Chunk> window;
  for (std::size_t i = 0; i < checks.size(); ++i) {
    for (std::uint64_t begin = 0; begin < checks[i].bytes; begin += step) {
      if (window.size() == kWindow) {
        finish(window.front());
        window.pop_front();
      }
      std::uint64_t bytes = std::min(step, checks[i].bytes - begin);
      Chunk chunk{i, begin, std::make_unique<PageBuffer>(bytes), {}};
      start_read(*shared_->volumes, checks[i].place->pieces, begin,
                 chunk.memory->span(), chunk.requests);
      window.push_back(std::move(chunk));
    }
  }
  for (Chunk& chunk : window) finish(chunk);
  return damages;
}

Result<std::vector<Damage>> StoreImpl::verify(const Store::Progress& progress) {
  MutexLock order(order_);  // no version goes away meanwhile
  (void)settle();
  std::vector<Version> versions;
  {
    MutexLock lock(mutex_);
    versions = versions_;
  }
  std::vector<Damage> damages;
  if (Status found = damage(); !found.ok()) damages.push_back({"-", found});
  for (const Version& version : versions) {
    if (version.info.damage.ok()) continue;
    damages.push_back({version.info.label(), version.info.damage});
  }
  for (Damage& damage : run_checks(checks_of(versions), progress)) {
    damages.push_back(std::move(damage));
  }
  return damages;
}

Result<VersionInfo> StoreImpl::load_intact(std::uint64_t wanted) {
  MutexLock order(order_);
  (void)settle();
  std::vector<Version> candidates;
  {
    MutexLock lock(mutex_);
    ZINF_ASSIGN(const Version* first, version_of(wanted));
    candidates.push_back(*first);
    for (auto version = versions_.rbegin(); version != versions_.rend();
         ++version) {
      if (version->info.id != wanted) candidates.push_back(*version);
    }
  }
  Status first_error;
  for (Version& candidate : candidates) {
    Status damage = candidate.info.damage;
    if (damage.ok()) {
      auto damages = run_checks(checks_of({candidate}), {});
      if (!damages.empty()) damage = damages[0].error;
    }
    MutexLock lock(mutex_);
    for (Version& version : versions_) {
      if (version.info.id == candidate.info.id) version.info.damage = damage;
    }
    if (damage.ok()) {
      ZINF_TRY(check_definitions(candidate));
      if (!first_error.ok()) {
        log(LogLevel::kWarning,
            "store: version %s is damaged (%s), falling back to version %s",
            candidates[0].info.label().c_str(), first_error.text().c_str(),
            candidate.info.label().c_str());
      }
      load_table(&candidate);
      in_step_ = false;
      unsynced_ = false;
      return candidate.info;
    }
    if (first_error.ok()) first_error = damage;
  }
  return first_error.in("no version is intact");
}

}  // namespace zinf::tier
