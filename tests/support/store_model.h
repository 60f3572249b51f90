// A store beside a simple model of it, on disks that can crash.
//
// StoreModel knows what a store must hold after each operation; StoreDriver
// carries out operations on both and compares. Content is named by a seed: see
// Buffer.
#pragma once

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/base/align.h"
#include "tests/support/buffer.h"
#include "tests/support/temp_dir.h"
#include "zinf/memory_disk.h"
#include "zinf/store.h"

namespace zinf {

// Where a store under test lives.
class CrashableDisk {
 public:
  virtual ~CrashableDisk() = default;
  // Puts the paths and the I/O options of the present disk in.
  virtual void fill(StoreOptions& options) = 0;
  // Lets a few more writes and syncs succeed on the store that is opened next
  // (or is open), then all fail.
  virtual void cut_power_after(std::uint64_t operations) = 0;
  // From now on the disk is one that was found after a crash. The store may
  // still be open on the old one.
  virtual void crash(std::uint64_t seed) = 0;
};

class MemoryCrashDisk final : public CrashableDisk {
 public:
  explicit MemoryCrashDisk(std::vector<double> weights)
      : weights_(std::move(weights)) {}

  void fill(StoreOptions& options) override {
    options.paths.clear();
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      options.paths.push_back(
          {.path = "run" + std::to_string(i), .weight = weights_[i]});
    }
    options.io.backend = io::Backend::kMemory;
    options.io.disk = disk_;
  }
  void cut_power_after(std::uint64_t operations) override {
    disk_->cut_power_after(operations);
  }
  void crash(std::uint64_t seed) override { disk_ = disk_->after_crash(seed); }
  io::MemoryDisk& disk() { return *disk_; }

 private:
  std::vector<double> weights_;
  std::shared_ptr<io::MemoryDisk> disk_ = std::make_shared<io::MemoryDisk>();
};

// Real files. A crash is a copy of them while the store is open: what a killed
// process leaves. (A power loss is for the disk in memory.)
class FileCrashDisk final : public CrashableDisk {
 public:
  explicit FileCrashDisk(std::size_t num_paths) : num_paths_(num_paths) {}

  void fill(StoreOptions& options) override {
    options.paths.clear();
    for (std::size_t i = 0; i < num_paths_; ++i) {
      options.paths.push_back({.path = path(i), .weight = 1});
    }
    options.io.backend = io::Backend::kThreads;
    options.io.threads = 1;
    options.io.faults.clear();
    if (!cut_) return;
    for (io::Operation on : {io::Operation::kWrite, io::Operation::kSync}) {
      options.io.faults.push_back({.on = on, .nth = *cut_, .and_after = true});
    }
    cut_.reset();
  }
  void cut_power_after(std::uint64_t operations) override {
    cut_ = operations / 2 + 1;
  }
  void crash(std::uint64_t /*seed*/) override {
    std::uint64_t before = generation_;
    ++generation_;
    for (std::size_t i = 0; i < num_paths_; ++i) {
      std::string from = dir_.file(name(before, i));
      if (!std::filesystem::exists(from + "/volume.zinf")) continue;
      std::filesystem::create_directory(path(i));
      std::filesystem::copy(from + "/volume.zinf", path(i) + "/volume.zinf");
    }
  }
  // Frees what the old stores were on.
  void forget_old() {
    for (std::uint64_t old = 0; old < generation_; ++old) {
      for (std::size_t i = 0; i < num_paths_; ++i) {
        std::filesystem::remove_all(dir_.file(name(old, i)));
      }
    }
  }

 private:
  static std::string name(std::uint64_t generation, std::size_t i) {
    return "g" + std::to_string(generation) + "-" + std::to_string(i);
  }
  std::string path(std::size_t i) const {
    return dir_.file(name(generation_, i));
  }

  const std::size_t num_paths_;
  TempDir dir_;
  std::uint64_t generation_ = 0;
  std::optional<std::uint64_t> cut_;
};

struct StoreModel {
  using Content = std::map<std::string, std::uint64_t>;  // unit -> seed
  using Sizes = std::map<std::string, std::uint64_t>;    // unit -> bytes
  struct Version {
    std::uint64_t id = 0;
    std::uint64_t step = 0;
    bool recent = true;
    std::vector<std::string> names;
    Content content;
    Sizes sizes;                               // of states defined then
    std::map<std::string, std::uint32_t> ids;  // since the store was opened

    bool kept() const { return !names.empty(); }
  };

  std::uint64_t every = 0;
  std::size_t max_kept = 1;
  std::uint64_t state_bytes = 0;  // that there is room for
  std::uint64_t num_states = 0;
  Sizes sizes;  // of defined states
  std::vector<Version> versions;
  Content working;
  std::uint64_t base = 0;
  bool in_step = false;

  Version* newest() { return versions.empty() ? nullptr : &versions.back(); }
  Version* find(const std::string& name) {
    for (Version& version : versions) {
      if (std::count(version.names.begin(), version.names.end(), name) > 0) {
        return &version;
      }
    }
    return nullptr;
  }
  std::size_t num_kept() const {
    return static_cast<std::size_t>(
        std::count_if(versions.begin(), versions.end(),
                      [](const Version& version) { return version.kept(); }));
  }
  void forget() {
    std::erase_if(versions, [](const Version& version) {
      return !version.recent && !version.kept();
    });
  }

  // Whether these states can be defined beside those that are.
  Code fits(const Sizes& more) const {
    Sizes all = sizes;
    for (const auto& [unit, bytes] : more) {
      auto [known, is_new] = all.emplace(unit, bytes);
      if (!is_new && known->second != bytes) return Code::kInvalid;
    }
    if (all.size() == sizes.size()) return Code::kOk;
    std::uint64_t total = 0;
    for (const auto& [unit, bytes] : all) total += padded(bytes);
    std::uint64_t room = padded(state_bytes) + num_states * 4096;
    bool fit = all.size() <= num_states && total <= room;
    return fit ? Code::kOk : Code::kNoSpace;
  }
  static std::uint64_t padded(std::uint64_t bytes) {
    return align_up(bytes, std::uint64_t{4096});
  }

  void begin_step() {
    if (in_step) return;
    std::uint64_t stays = 0;
    for (const Version& version : versions) {
      if (version.recent && stays != base) stays = version.id;
      if (version.recent && version.id == base) stays = base;
    }
    bool room = every != 0 || num_kept() < max_kept;
    for (Version& version : versions) {
      version.recent = version.id == stays && (room || version.kept());
    }
    forget();
    in_step = true;
  }
  void put(const std::string& unit, std::uint64_t seed) {
    begin_step();
    working[unit] = seed;
  }
  void commit(std::uint64_t id, std::uint64_t step) {
    std::uint64_t last = 0;
    for (const Version& version : versions) {
      if (version.recent) last = version.id;
    }
    for (Version& version : versions) version.recent = version.id == last;
    forget();
    versions.push_back({id, step, true, {}, working, sizes, {}});
    base = id;
    in_step = false;
  }
  void load(const Version* version) {
    working = version != nullptr ? version->content : Content();
    if (version != nullptr) {
      sizes.insert(version->sizes.begin(), version->sizes.end());
    }
    base = version != nullptr ? version->id : 0;
    in_step = false;
  }
};

// Each operation returns "" or what was wrong. When `failed()` the power was
// cut under the last one: it may have happened or not, and only crash() is
// left.
class StoreDriver {
 public:
  StoreDriver(CrashableDisk& disk, std::uint64_t every, int kept,
              std::size_t block_bytes)
      : disk_(disk) {
    options_.durability = {every};
    options_.kept = kept;
    options_.block_bytes = block_bytes;
    options_.state_bytes = model_.state_bytes = 400 * kKiB;
    options_.num_states = model_.num_states = 6;
    options_.extra_bytes = 6000;
    options_.verify = Verify::kAlways;
    options_.io.block_bytes = 16 * kKiB;
    options_.io.depth = 4;
    model_.every = every;
    model_.max_kept = static_cast<std::size_t>(kept);
    disk_.fill(options_);
    Result<std::unique_ptr<Store>> store = Store::create(options_);
    if (store.ok()) store_ = std::move(store).value();
    if (!store.ok()) broken_ = store.status().text();
  }

  const std::string& broken() const { return broken_; }
  bool failed() const { return maybe_.has_value(); }
  StoreModel& model() { return model_; }
  Store& store() { return *store_; }

  std::string define(const std::string& unit, std::uint64_t bytes) {
    Code wanted = model_.fits({{unit, bytes}});
    Result<StateId> id = store_->define({.unit = unit,
                                         .state = "weight",
                                         .dtype = "uint8",
                                         .shape = {bytes},
                                         .bytes = bytes});
    if (id.status().code() != wanted) return "define " + id.status().text();
    if (id.ok()) model_.sizes[unit] = bytes;
    return "";
  }

  std::string discard(const std::string& unit) {
    if (!model_.sizes.contains(unit)) return "";
    model_.working.erase(unit);
    return wrong_of(store_->discard(id_of(unit)));
  }

  std::string remove(const std::string& unit) {
    if (!model_.sizes.contains(unit)) return "";
    Status status = store_->remove(id_of(unit));
    model_.working.erase(unit);
    model_.sizes.erase(unit);
    return wrong_of(status);
  }

  std::string reserve(std::uint64_t state_bytes, std::size_t num_states) {
    StoreModel after = model_;
    after.state_bytes = std::max(after.state_bytes, state_bytes);
    after.num_states = std::max<std::uint64_t>(after.num_states, num_states);
    return settle(store_->reserve(state_bytes, num_states), after, after);
  }

  std::string put(const std::string& unit, std::uint64_t seed) {
    if (!model_.sizes.contains(unit)) return "";
    StoreModel after = model_;
    after.put(unit, seed);
    StoreModel begun = model_;
    begun.begin_step();
    Buffer data(model_.sizes[unit], seed);
    return settle(store_->put(id_of(unit), data.span()).wait(), after, begun);
  }

  std::string set_extra(std::uint64_t bytes) {
    StoreModel after = model_;
    after.put("", bytes);
    StoreModel begun = model_;
    begun.begin_step();
    Buffer data(bytes, bytes);
    return settle(store_->set_extra(data.span()), after, begun);
  }

  std::string get(const std::string& unit) {
    if (!model_.sizes.contains(unit)) {
      bool found = store_->find(unit, "weight").ok();
      return found ? "a state from nowhere" : "";
    }
    Buffer got(model_.sizes[unit], 999);
    Status status = store_->get(id_of(unit), got.span()).wait();
    auto wanted = model_.working.find(unit);
    if (wanted == model_.working.end()) {
      return status.code() == Code::kNotFound ? "" : "content from nowhere";
    }
    if (!status.ok()) return status.text();
    return got == Buffer(got.size(), wanted->second) ? ""
                                                     : "other bytes: " + unit;
  }

  std::string get_extra() {
    Result<std::vector<std::byte>> got = store_->extra();
    if (!got.ok()) return got.status().text();
    auto wanted = model_.working.find("");
    std::uint64_t bytes =
        wanted != model_.working.end() ? wanted->second : std::uint64_t{0};
    Buffer data(bytes, bytes);
    bool same = std::equal(got->begin(), got->end(), data.span().begin(),
                           data.span().end());
    return same ? "" : "another extra";
  }

  std::string commit() {
    ++step_;
    StoreModel after = model_;
    Status status = store_->commit(step_);
    std::uint64_t id = status.ok() ? store_->versions().back().id : 0;
    after.commit(id, step_);
    for (const auto& [unit, bytes] : model_.sizes) {
      after.versions.back().ids[unit] = id_of(unit).index;
    }
    return settle(status, after, after);
  }

  std::string begin_step() {
    StoreModel after = model_;
    after.begin_step();
    return settle(store_->begin_step(), after, after);
  }

  std::string keep(const std::string& name) {
    StoreModel after = model_;
    StoreModel::Version* newest = after.newest();
    Code wanted = Code::kOk;
    if (after.find(name) != nullptr) {
      wanted = Code::kInvalid;
    } else if (newest == nullptr) {
      wanted = Code::kNotFound;
    } else if (!newest->kept() && after.num_kept() >= after.max_kept) {
      wanted = Code::kNoSpace;
    } else {
      newest->names.push_back(name);
    }
    Status status = store_->keep(name);
    if (wanted != Code::kOk) return status.code() == wanted ? "" : "keep";
    return settle(status, after, after);
  }

  std::string drop(const std::string& name) {
    StoreModel after = model_;
    StoreModel::Version* version = after.find(name);
    Status status = store_->drop(name);
    if (version == nullptr) {
      return status.code() == Code::kNotFound ? "" : "drop";
    }
    std::erase(version->names, name);
    after.forget();
    return settle(status, after, after);
  }

  std::string rollback() {
    const StoreModel::Version* newest = model_.newest();
    return settle_load(store_->rollback(), newest);
  }

  std::string load(std::size_t which) {
    if (model_.versions.empty()) return "";
    const auto& version = model_.versions[which % model_.versions.size()];
    return settle_load(store_->load(version.id), &version);
  }

  // The process ends without a word, the disk keeps what it may, and the store
  // is opened again.
  std::string crash(std::uint64_t seed) {
    disk_.crash(seed);
    store_.reset();
    disk_.fill(options_);
    Result<std::unique_ptr<Store>> store = Store::open(options_);
    if (!store.ok()) return store.status().text();
    store_ = std::move(store).value();
    if (same_versions(model_) && same_room(model_)) {
      maybe_.reset();
    } else if (maybe_ && same_versions(*maybe_) && same_room(*maybe_)) {
      model_ = *std::exchange(maybe_, std::nullopt);
    } else {
      return "other versions than were committed:" + list();
    }
    // Marks of the last two may be older than the model's by a begin_step().
    std::vector<VersionInfo> found = store_->versions();
    for (std::size_t i = 0; i < found.size(); ++i) {
      model_.versions[i].id = found[i].id;
      model_.versions[i].recent = found[i].recent;
    }
    for (StoreModel::Version& version : model_.versions) version.ids.clear();
    // Definitions are those of the version that was opened.
    model_.sizes.clear();
    model_.load(model_.newest());
    StoreModel::Sizes sizes;
    for (const StateSpec& spec : store_->states()) {
      sizes[spec.unit] = spec.bytes;
    }
    if (sizes != model_.sizes) return "other states than were committed";
    return check_all();
  }

  // Reads every state of every version. Nothing but the newest is defined
  // afterwards.
  std::string check_all() {
    if (std::string wrong = check_working(); !wrong.empty()) return wrong;
    for (std::size_t i = 0; i < model_.versions.size(); ++i) {
      std::string wrong = remove_all();
      if (wrong.empty()) wrong = load(i);
      if (wrong.empty()) wrong = check_working();
      if (wrong.empty()) wrong = check_contents(model_.versions[i]);
      if (!wrong.empty()) return wrong;
    }
    std::string wrong = remove_all();
    return wrong.empty() ? rollback() : wrong;
  }

 private:
  static std::string wrong_of(const Status& status) {
    return status.ok() ? "" : status.text();
  }
  StateId id_of(const std::string& unit) {
    return store_->find(unit, "weight").value();
  }

  std::string remove_all() {
    while (!model_.sizes.empty()) {
      std::string wrong = remove(model_.sizes.begin()->first);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  std::string check_contents(const StoreModel::Version& version) {
    Result<std::vector<StateSpec>> specs = store_->contents(version.id);
    if (!specs.ok()) return specs.status().text();
    StoreModel::Sizes found;
    for (const StateSpec& spec : *specs) found[spec.unit] = spec.bytes;
    StoreModel::Sizes wanted;
    for (const auto& [unit, seed] : version.content) {
      if (!unit.empty()) wanted[unit] = version.sizes.at(unit);
    }
    return found == wanted ? "" : "other contents";
  }

  std::string check_working() {
    for (const auto& [unit, size] : model_.sizes) {
      if (std::string wrong = get(unit); !wrong.empty()) return wrong;
    }
    return get_extra();
  }

  // On success the store is as `after`; when it failed, as before or as
  // `maybe`.
  std::string settle(const Status& status, const StoreModel& after,
                     const StoreModel& maybe) {
    if (status.ok()) {
      model_ = after;
      return same_versions(model_) ? "" : "other versions:" + list();
    }
    if (status.errnum() != 5) return status.text();  // not our power cut
    maybe_ = maybe;
    return "";
  }

  // `version` was loaded, with its states under the same ids, or is refused
  // because of what is defined.
  std::string settle_load(const Status& status,
                          const StoreModel::Version* version) {
    if (version != nullptr) {
      Code wanted = model_.fits(version->sizes);
      if (status.code() != wanted) return "load: " + status.text();
      if (wanted != Code::kOk) return "";
      for (const auto& [unit, index] : version->ids) {
        if (id_of(unit).index != index) return "another id: " + unit;
      }
    }
    model_.load(version);
    return wrong_of(status);
  }

  bool same_room(const StoreModel& model) const {
    StoreStats stats = store_->stats();
    return stats.state_bytes == model.state_bytes &&
           stats.num_states == model.num_states;
  }

  bool same_versions(const StoreModel& model) const {
    std::vector<VersionInfo> found = store_->versions();
    if (found.size() != model.versions.size()) return false;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const StoreModel::Version& wanted = model.versions[i];
      bool same = (wanted.id == 0 || found[i].id == wanted.id) &&
                  found[i].step == wanted.step &&
                  found[i].names == wanted.names;
      if (!same) return false;
    }
    return true;
  }

  std::string list() const {
    std::string text;
    for (const VersionInfo& info : store_->versions()) {
      text += " [" + info.label() + "]";
    }
    text += " for";
    for (const StoreModel::Version& version : model_.versions) {
      text += " [step " + std::to_string(version.step) + "]";
    }
    return text;
  }

  CrashableDisk& disk_;
  StoreOptions options_;
  std::unique_ptr<Store> store_;
  StoreModel model_;
  std::optional<StoreModel> maybe_;  // if the operation that failed happened
  std::uint64_t step_ = 0;
  std::string broken_;
};

}  // namespace zinf
