// zinf checkpoint: what is in a store, whether it is whole, and removing what
// nobody uses.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/progress.h"
#include "src/base/json.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/store.h"

namespace zinf::cli {
namespace {

constexpr std::size_t kMostDamages = 20;  // that verify prints

StoreOptions options_for(const std::vector<std::string>& directories,
                         Access access) {
  StoreOptions options;
  options.access = access;
  options.fall_back = true;
  for (const std::string& directory : directories) {
    options.paths.push_back({.path = directory, .weight = 1});
  }
  return options;
}

int owner_of(const std::string& directory) {
  for (const FoundStore& found : find_stores(directory)) {
    if (found.path == directory) return found.owner;
  }
  return 0;
}

std::string use_text(int owner) {
  if (owner == 0) return "not in use";
  return owner > 0 ? strf("in use by process %d", owner) : "in use";
}

std::string time_text(std::int64_t created_ns) {
  std::time_t seconds = created_ns / 1'000'000'000;
  std::tm local{};
  localtime_r(&seconds, &local);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &local);
  return text.data();
}

// The directories of one store each. DIR may be a folder with stores in it.
struct Named {
  bool folder = false;
  std::vector<std::vector<std::string>> stores;
};

Named named_by(const std::vector<std::string>& directories) {
  if (directories.size() > 1) return {.stores = {directories}};
  Named named{.folder = true, .stores = {}};
  for (const FoundStore& one : find_stores(directories[0])) {
    if (one.path == directories[0]) return {.stores = {directories}};
    if (!one.leftover) named.stores.push_back({one.path});
  }
  if (named.stores.empty()) return {.stores = {directories}};
  return named;
}

// Of several ranks there is a store each: the first that is missing.
std::string missing_rank(const Named& named) {
  std::set<std::string> names;
  for (const std::vector<std::string>& store : named.stores) {
    names.insert(std::filesystem::path(store[0]).filename().string());
  }
  int ranks = 0;
  int rank = 0;
  for (const std::string& name : names) {
    if (std::sscanf(name.c_str(), "rank-%d-of-%d", &rank, &ranks) == 2) break;
    ranks = 0;
  }
  for (rank = 0; rank < ranks; ++rank) {
    std::string name = strf("rank-%05d-of-%05d", rank, ranks);
    if (!names.contains(name)) return name;
  }
  return "";
}

// Does it with every store, whatever becomes of others; says which failed, on
// standard output unless that is `json`.
Status for_each_store(
    const Named& named, const CheckpointArguments& args,
    const std::function<Status(const std::vector<std::string>&)>& action) {
  if (!named.folder) return action(named.stores[0]);
  std::size_t failed = 0;
  for (const std::vector<std::string>& store : named.stores) {
    Status status = action(store);
    if (status.ok()) continue;
    ++failed;
    if (!args.json) {
      std::printf("%s failed: %s\n", store[0].c_str(), status.text().c_str());
    }
  }
  if (std::string missing = missing_rank(named); !missing.empty()) {
    return Status::error(Code::kCorrupt,
                         strf("%s is no whole checkpoint: it has no %s",
                              args.directories[0].c_str(), missing.c_str()));
  }
  if (failed == 0) return {};
  return Status::error(Code::kCorrupt,
                       strf("%zu of the %zu stores in %s failed", failed,
                            named.stores.size(), args.directories[0].c_str()));
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names)
    text += (text.empty() ? "" : ", ") + name;
  return text;
}

JsonObject json_of(const StateSpec& spec) {
  JsonObject json;
  json.add("unit", spec.unit)
      .add("state", spec.state)
      .add("dtype", spec.dtype)
      .add("shape", spec.shape)
      .add("shard_index", std::uint64_t{spec.shard_index})
      .add("shard_count", std::uint64_t{spec.shard_count})
      .add("bytes", spec.bytes);
  return json;
}

JsonObject json_of(const VersionInfo& version, Store& store) {
  std::vector<JsonObject> states;
  Result<std::vector<StateSpec>> specs = store.contents(version.id);
  if (specs.ok()) {
    for (const StateSpec& spec : *specs) states.push_back(json_of(spec));
  }
  JsonObject json;
  json.add("id", version.id)
      .add("step", version.step)
      .add("created", static_cast<double>(version.created_ns) * 1e-9)
      .add("recent", version.recent)
      .add("names", version.names)
      .add("bytes", version.bytes)
      .add("damage", version.damage.ok() ? "" : version.damage.text())
      .add("states", states);
  return json;
}

JsonObject json_of(Store& store, int owner) {
  StoreStats stats = store.stats();
  std::vector<JsonObject> versions;
  for (const VersionInfo& version : store.versions()) {
    versions.push_back(json_of(version, store));
  }
  JsonObject json;
  json.add("paths", store.paths())
      .add("owner", owner)
      .add("block", std::uint64_t{store.block_bytes()})
      .add("state_bytes", stats.state_bytes)
      .add("num_states", stats.num_states)
      .add("capacity", stats.capacity_bytes)
      .add("free", stats.free_bytes)
      .add("damage", store.damage().ok() ? "" : store.damage().text())
      .add("versions", versions);
  return json;
}

// Of the store, or of the first version that has any.
Status damage_of(Store& store) {
  ZINF_TRY(store.damage());
  for (const VersionInfo& version : store.versions()) {
    ZINF_TRY(version.damage.in("version " + version.label()));
  }
  return {};
}

void print_store(Store& store, int owner) {
  StoreStats stats = store.stats();
  std::printf("%s: %s\n", joined(store.paths()).c_str(),
              use_text(owner).c_str());
  std::printf("  made for %llu states of %s together, blocks of %s\n",
              static_cast<unsigned long long>(stats.num_states),
              format_bytes(stats.state_bytes).c_str(),
              format_bytes(store.block_bytes()).c_str());
  std::printf("  room for %s of all versions, %s free\n\n",
              format_bytes(stats.capacity_bytes).c_str(),
              format_bytes(stats.free_bytes).c_str());
  if (store.versions().empty()) {
    std::printf("  no version was committed\n");
    return;
  }
  std::printf("  %10s  %-19s  %7s  %12s  %s\n", "step", "committed", "states",
              "size", "kept as");
  for (const VersionInfo& version : store.versions()) {
    std::printf("  %10llu  %-19s  %7llu  %12s  %s\n",
                static_cast<unsigned long long>(version.step),
                time_text(version.created_ns).c_str(),
                static_cast<unsigned long long>(version.num_states),
                format_bytes(version.bytes).c_str(),
                version.names.empty() ? "-" : joined(version.names).c_str());
    if (!version.damage.ok()) {
      std::printf("              damaged: %s\n", version.damage.text().c_str());
    }
  }
}

// Prints what the store holds, or writes it into `json`. Damage is a failure.
Status inspect(const std::vector<std::string>& directories, JsonObject* json) {
  auto opened = Store::open(options_for(directories, Access::kRead));
  if (!opened.ok()) {
    if (json != nullptr) {
      json->add("paths", directories).add("error", opened.status().text());
    }
    return opened.status();
  }
  Store& store = **opened;
  int owner = owner_of(directories[0]);
  if (json != nullptr) {
    *json = json_of(store, owner);
  } else {
    print_store(store, owner);
  }
  Status damage = damage_of(store);
  if (damage.ok() || owner == 0) return damage;
  return damage.in("the store is " + use_text(owner) +
                   "; if this stays, it is damaged");
}

Status verify(const std::vector<std::string>& directories) {
  ZINF_ASSIGN(auto store,
              Store::open(options_for(directories, Access::kShared)));
  std::vector<Damage> damages;
  std::uint64_t bytes = 0;
  {
    std::unique_ptr<Progress> bar;
    auto progress = [&](std::uint64_t done, std::uint64_t total) {
      if (bar == nullptr) {
        bar = std::make_unique<Progress>("verifying", total,
                                         Progress::Unit::kBytes);
      }
      bar->update(done);
      bytes = total;
    };
    ZINF_ASSIGN(damages, store->verify(progress));
  }
  std::size_t versions = store->versions().size();
  if (damages.empty() && versions == 0) {
    return Status::error(Code::kNotFound,
                         joined(store->paths()) +
                             " holds no version: a save that was not finished, "
                             "or a run that has not committed");
  }
  if (damages.empty()) {
    std::printf("%s: %zu version%s, %s read, every checksum is right\n",
                joined(store->paths()).c_str(), versions,
                versions == 1 ? "" : "s", format_bytes(bytes).c_str());
    return {};
  }
  for (std::size_t i = 0; i < damages.size() && i < kMostDamages; ++i) {
    std::printf("bad: %s\n", damages[i].error.text().c_str());
  }
  if (damages.size() > kMostDamages) {
    std::printf("and %zu more\n", damages.size() - kMostDamages);
  }
  return Status::error(
      Code::kCorrupt,
      strf("%s: %zu of the blocks and tables in %zu versions "
           "are damaged",
           joined(store->paths()).c_str(), damages.size(), versions));
}

}  // namespace

Status run_inspect(const CheckpointArguments& args) {
  Named named = named_by(args.directories);
  std::vector<JsonObject> reports;
  Status status = for_each_store(
      named, args, [&](const std::vector<std::string>& directories) {
        if (!args.json && &directories != &named.stores[0]) std::puts("");
        return inspect(directories,
                       args.json ? &reports.emplace_back() : nullptr);
      });
  if (args.json) {
    JsonObject json =
        named.folder ? JsonObject().add("stores", reports) : reports[0];
    std::printf("%s\n", json.text().c_str());
  }
  return status;
}

Status run_verify(const CheckpointArguments& args) {
  return for_each_store(named_by(args.directories), args, verify);
}

std::string precious(const FoundStore& found) {
  if (found.leftover) return "";
  if (found.num_volumes > 1) {
    return strf("is volume %d of %d of a store; --all removes it", found.volume,
                found.num_volumes);
  }
  Result<std::unique_ptr<Store>> store =
      Store::open(options_for({found.path}, Access::kRead));
  if (!store.ok()) {
    return "cannot be read (" + store.status().text() + "); --all removes it";
  }
  if (Status damage = store.value()->damage(); !damage.ok()) {
    return "is damaged (" + damage.text() + "); --all removes it";
  }
  std::vector<std::string> names;
  for (const VersionInfo& version : store.value()->versions()) {
    names.insert(names.end(), version.names.begin(), version.names.end());
  }
  if (names.empty()) return "";
  return "holds kept versions (" + joined(names) + "); --all removes it";
}

Status run_prune(const CheckpointArguments& args) {
  for (const std::string& directory : args.directories) {
    std::error_code error;
    if (!std::filesystem::is_directory(directory, error)) {
      return Status::system("look into", directory,
                            error ? error.value() : ENOTDIR);
    }
  }
  std::size_t removed = 0;
  std::size_t kept = 0;
  std::uint64_t bytes = 0;
  for (const std::string& directory : args.directories) {
    for (const FoundStore& found : find_stores(directory)) {
      std::string stays;
      if (found.owner != 0) {
        stays = "is " + use_text(found.owner);
      } else if (!args.all) {
        stays = precious(found);
      }
      if (stays.empty() && !args.dry_run) {
        Status status = remove_store(found);
        if (status.code() == Code::kPermission) {
          stays = status.text();
        } else {
          ZINF_TRY(status);
        }
      }
      if (!stays.empty()) {
        ++kept;
        std::printf("kept     %s: %s\n", found.path.c_str(), stays.c_str());
        continue;
      }
      ++removed;
      bytes += found.bytes;
      std::printf("%s  %s, %s\n", args.dry_run ? "would go" : "removed ",
                  found.path.c_str(), format_bytes(found.bytes).c_str());
    }
  }
  std::printf("%zu %s (%s), %zu kept\n", removed,
              args.dry_run ? "would be removed" : "removed",
              format_bytes(bytes).c_str(), kept);
  return {};
}

}  // namespace zinf::cli
