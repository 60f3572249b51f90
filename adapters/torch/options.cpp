#include "adapters/torch/options.h"

#include <ATen/DeviceAccelerator.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "adapters/torch/error.h"
#include "zinf/bytes.h"
#include "zinf/engine.h"

namespace zinf {
namespace {

// Of what is to live on NVMe, so much may be in memory unused.
constexpr std::uint64_t kAwayBytes = std::uint64_t{1} << 20;

std::uint64_t bytes_of(const MemorySize& size, const std::string& name) {
  if (!size.given()) return 0;
  Result<std::uint64_t> bytes = parse_bytes(size.text());
  if (size.text().starts_with('-') || (bytes.ok() && *bytes == 0)) {
    refuse(name + " is \"" + size.text() + "\", must be more than nothing");
  }
  throw_if_error(bytes.status().in(name));
  if (*bytes >= std::uint64_t{1} << 63) {
    refuse(name + " is \"" + size.text() + "\", which is more than any memory");
  }
  return *bytes;
}

std::uint64_t device_bytes_of(const MemorySize& size) {
  std::uint64_t bytes = bytes_of(size, "device_memory");
  if (bytes != 0 && !at::getAccelerator(false).has_value()) {
    refuse(
        "device_memory is given, but there is no device: the CPU uses "
        "host_memory");
  }
  return bytes;
}

Where parse_where(const std::string& argument, const std::string& value) {
  if (value == "auto") return Where::kAuto;
  if (value == "host") return Where::kHost;
  if (value == "nvme") return Where::kNvme;
  refuse(argument + " is \"" + value +
         "\", must be \"auto\", \"host\" or \"nvme\"");
}

std::string system_text(int error) {
  return std::error_code(error, std::generic_category()).message();
}

// What is wrong with it, or nothing.
std::string problem_of(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    return fs::exists(path, error) ? "is not a directory" : "does not exist";
  }
  std::string folder = path + "/zinf-probe-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) {
    return "takes no files (" + system_text(errno) + ")";
  }
  errno = 0;
  bool written{std::ofstream(folder + "/file") << 'x' << std::flush};
  std::string why = system_text(errno);
  fs::remove_all(folder, error);
  return written ? "" : "takes no files (" + why + ")";
}

// The private folder is made when it is needed first, hours later perhaps: so
// it is tried now.
NvmePath tried_directory(const std::string& text) {
  Result<NvmePath> parsed = parse_nvme_path(text);
  throw_if_error(parsed.status());
  std::string problem = problem_of(parsed->path);
  if (!problem.empty()) {
    refuse("nvme path \"" + parsed->path + "\" " + problem +
           ": name a directory on a disk, with leave to write");
  }
  return *parsed;
}

// ZINF_PREFETCH, for measurements of what it gives.
bool prefetch_wanted() {
  const char* value = std::getenv("ZINF_PREFETCH");
  std::string_view text = value == nullptr ? "1" : value;
  if (text != "0" && text != "1") {
    refuse("ZINF_PREFETCH in the environment is \"" + std::string(text) +
           "\": 0 turns moves ahead of uses off, 1 leaves them on");
  }
  return text == "1";
}

}  // namespace

ManagerOptions manager_options(const EngineOptions& options) {
  if (options.evict != "auto" && options.evict != "always") {
    refuse("evict is \"" + options.evict +
           "\", must be \"auto\" or \"always\"");
  }
  if (options.stage < 1 || options.stage > 3) {
    refuse("stage is " + std::to_string(options.stage) +
           ", must be 1 (optimizer states are split over ranks), 2 (gradients "
           "too) or 3 (weights too)");
  }
  if (options.deterministic != "ranks" && options.deterministic != "world") {
    refuse("deterministic is \"" + options.deterministic +
           "\", must be \"ranks\" (the same bits for the same number of ranks) "
           "or \"world\" (for any power of two of them)");
  }
  ManagerOptions made;
  made.stage = options.stage;
  made.world = options.deterministic == "world";
  made.partition_group = options.partition_group;
  made.evict_always = options.evict == "always";
  made.audit = options.audit;
  made.host_bytes = bytes_of(options.host_memory, "host_memory");
  if (made.host_bytes > kAddressSpaceBytes) {
    refuse("host_memory is \"" + options.host_memory.text() +
           "\", which is more than any memory");
  }
  made.device_bytes = device_bytes_of(options.device_memory);
  made.tier.weights = parse_where("weights", options.weights);
  made.tier.states = parse_where("states", options.states);
  made.tier.away_bytes = made.evict_always ? 0 : kAwayBytes;
  made.tier.prefetch = !made.evict_always && prefetch_wanted();
  made.tier.endurance_bytes =
      bytes_of(options.nvme_endurance, "nvme_endurance");
  for (const std::string& path : options.nvme.paths()) {
    made.tier.nvme.push_back(tried_directory(path));
  }
  return made;
}

}  // namespace zinf
