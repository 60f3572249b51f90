#include "adapters/torch/options.h"

#include <ATen/DeviceAccelerator.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "adapters/torch/error.h"
#include "src/io/scratch.h"
#include "zinf/bytes.h"
#include "zinf/engine.h"
#include "zinf/machine.h"

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

// A limit above that would end in the kernel's out-of-memory killer.
void check_machine_has(std::uint64_t bytes, const std::string& text) {
  Machine machine = inspect_machine();
  std::uint64_t most = machine.memory_bytes;
  std::string whose = "the machine";
  if (machine.cgroup_limit_bytes && *machine.cgroup_limit_bytes < most) {
    most = *machine.cgroup_limit_bytes;
    whose = "the control group of this process";
  }
  if (bytes <= most || most == 0) return;
  refuse("host_memory is \"" + text + "\", but " + whose + " has " +
         format_bytes(most) +
         ": give less, or nothing for 80 % of what is free");
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
  Result<io::Scratch> file = io::Scratch::open(path);
  bool written = file.ok() && pwrite(file->fd(), "x", 1, 0) == 1;
  if (written) return "";
  int why = file.ok() ? errno : file.status().errnum();
  return "takes no files (" + system_text(why) + ")";
}

// The file is made when it is needed first, hours later perhaps: so that is
// tried now.
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
  check_machine_has(made.host_bytes, options.host_memory.text());
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
