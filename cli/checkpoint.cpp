// zinf checkpoint: what is in a store, whether it is whole, and removing what
// nobody uses.
#include <array>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
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

std::string time_text(std::int64_t created_ns) {
  std::time_t seconds = created_ns / 1'000'000'000;
  std::tm local{};
  localtime_r(&seconds, &local);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &local);
  return text.data();
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

void print_store(Store& store, int owner) {
  StoreStats stats = store.stats();
  std::printf(
      "%s: %s\n", joined(store.paths()).c_str(),
      owner != 0 ? strf("in use by process %d", owner).c_str() : "not in use");
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

}  // namespace

Status run_inspect(const CheckpointArguments& args) {
  ZINF_ASSIGN(auto store,
              Store::open(options_for(args.directories, Access::kRead)));
  int owner = owner_of(args.directories[0]);
  if (!args.json) {
    print_store(*store, owner);
    return {};
  }
  StoreStats stats = store->stats();
  std::vector<JsonObject> versions;
  for (const VersionInfo& version : store->versions()) {
    versions.push_back(json_of(version, *store));
  }
  JsonObject json;
  json.add("paths", store->paths())
      .add("owner", owner)
      .add("block", std::uint64_t{store->block_bytes()})
      .add("state_bytes", stats.state_bytes)
      .add("num_states", stats.num_states)
      .add("capacity", stats.capacity_bytes)
      .add("free", stats.free_bytes)
      .add("versions", versions);
  std::printf("%s\n", json.text().c_str());
  return {};
}

Status run_verify(const CheckpointArguments& args) {
  ZINF_ASSIGN(auto store,
              Store::open(options_for(args.directories, Access::kWrite)));
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
    std::printf("%s: %zu versions, %s read, every checksum is right\n",
                joined(store->paths()).c_str(), versions,
                format_bytes(bytes).c_str());
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

std::string precious(const FoundStore& found) {
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
        stays = strf("is in use by process %d", found.owner);
      } else if (!args.all) {
        stays = precious(found);
      }
      if (stays.empty() && !args.dry_run) {
        Status status = remove_store(found.path);
        if (status.code() == Code::kPermission) {
          stays = status.text();  // somebody came before us
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
