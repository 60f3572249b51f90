// zinf doctor: would training work here, and how well.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include "cli/command.h"
#include "cli/progress.h"
#include "src/base/align.h"
#include "src/base/json.h"
#include "src/base/strf.h"
#include "zinf/bytes.h"
#include "zinf/disk.h"
#include "zinf/io_bench.h"
#include "zinf/log.h"
#include "zinf/machine.h"
#include "zinf/store.h"
#include "zinf/version.h"

namespace zinf::cli {
namespace {

constexpr const char* kTorchVersion = "2.13.";

enum class Verdict : std::uint8_t { kOk, kWarning, kFailure };

struct Finding {
  std::string name;
  Verdict verdict = Verdict::kOk;
  std::string value;
  std::string remedy = {};  // what to do about a warning or failure
};

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok";
    case Verdict::kWarning:
      return "warning";
    case Verdict::kFailure:
      return "failure";
  }
  return "?";
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words)
    text += (text.empty() ? "" : " ") + word;
  return text;
}

void examine_machine(const Machine& machine, std::vector<Finding>& findings) {
  findings.push_back({"cpu", Verdict::kOk,
                      strf("%s, %d cores, %s", machine.cpu.c_str(),
                           machine.cores, joined(machine.isa).c_str())});
  std::string isa = joined(machine.isa);
  if (isa.find("bf16") == std::string::npos) {
    findings.push_back(
        {"bf16", Verdict::kWarning, "no bf16 instructions: bf16 GEMMs crawl",
         "train in fp32 on this CPU (accelerators are not concerned)"});
  }
  findings.push_back(
      {"memory", Verdict::kOk,
       strf("%s, %s available", format_bytes(machine.memory_bytes).c_str(),
            format_bytes(machine.available_bytes).c_str())});
  if (machine.cgroup_limit_bytes) {
    findings.push_back({"cgroup limit", Verdict::kOk,
                        format_bytes(*machine.cgroup_limit_bytes)});
  }
  bool limited =
      machine.memlock_bytes && geteuid() != 0 && *machine.memlock_bytes < kGiB;
  findings.push_back(
      {"memlock", limited ? Verdict::kWarning : Verdict::kOk,
       machine.memlock_bytes
           ? format_bytes(*machine.memlock_bytes) +
                 (geteuid() == 0 ? " (root is not bound by it)" : "")
           : "unlimited",
       limited ? "transfers cost more CPU without registered memory: raise it "
                 "(ulimit -l)"
               : ""});
  bool huge = machine.huge_pages != "never";
  findings.push_back({"huge pages", huge ? Verdict::kOk : Verdict::kWarning,
                      machine.huge_pages,
                      huge ? ""
                           : "fresh memory is slower: set transparent_hugepage "
                             "to madvise"});
}

void examine_uring(const Machine& machine, std::vector<Finding>& findings) {
  Status uring = io::probe_uring();
  if (uring.ok()) {
    findings.push_back({"io_uring", Verdict::kOk, "kernel " + machine.kernel});
    return;
  }
  const char* remedy =
      uring.errnum() == ENOMEM   ? "raise the memlock limit (ulimit -l)"
      : uring.errnum() == EMFILE ? "raise the limit of open files (ulimit -n)"
      : uring.errnum() == ENOSYS
          ? "a newer kernel has it (6.1 and later in full)"
          : "allow it with sysctl kernel.io_uring_disabled=0, or in the "
            "container's seccomp profile";
  findings.push_back(
      {"io_uring", Verdict::kWarning, uring.text(),
       strf("zinf uses threads instead, with more CPU per transfer; %s",
            remedy)});
}

// A short measurement: enough to tell an NVMe drive from a disk.
void examine_speed(const std::string& path, std::vector<Finding>& findings) {
  Progress progress("measuring the disk", 3, Progress::Unit::kSteps);
  auto measure = [&]() -> Result<std::string> {
    ZINF_ASSIGN(io::Bench bench, io::Bench::in_directory(path, 256 * kMiB));
    ZINF_TRY(bench.open({}));
    progress.update(1);
    ZINF_ASSIGN(io::Sample write, bench.run(io::Direction::kWrite));
    progress.update(2);
    ZINF_ASSIGN(io::Sample read, bench.run(io::Direction::kRead));
    return strf("read %s, write %s", format_rate(read.gbps() * 1e9).c_str(),
                format_rate(write.gbps() * 1e9).c_str());
  };
  Result<std::string> speed = measure();
  if (speed.ok()) {
    findings.push_back({"disk speed", Verdict::kOk, *speed});
  } else {
    findings.push_back({"disk speed", Verdict::kFailure, speed.status().text(),
                        "choose a path on a healthy disk with room"});
  }
}

void examine_disk(const std::string& path, std::vector<Finding>& findings) {
  Result<io::Disk> disk = io::inspect_disk(path);
  if (!disk.ok()) {
    findings.push_back({"disk", Verdict::kFailure, disk.status().text(),
                        "name a directory that exists and may be written"});
    return;
  }
  Finding file_system{"file system", Verdict::kOk, disk->file_system};
  if (disk->network) {
    file_system.verdict = Verdict::kWarning;
    file_system.remedy =
        "a network file system is slow and may lose writes at "
        "a crash: use a local NVMe drive";
  } else if (disk->in_memory) {
    file_system.verdict = Verdict::kWarning;
    file_system.remedy =
        "it takes the memory that it should relieve: use a real disk";
  }
  findings.push_back(file_system);
  findings.push_back({"O_DIRECT",
                      disk->direct ? Verdict::kOk : Verdict::kWarning,
                      disk->direct ? "works" : "not here",
                      disk->direct ? ""
                                   : "transfers go through the page cache, "
                                     "slower: use ext4 or xfs"});
  bool roomy = disk->free_bytes >= kGiB;
  findings.push_back(
      {"disk space", roomy ? Verdict::kOk : Verdict::kFailure,
       strf("%s free of %s", format_bytes(disk->free_bytes).c_str(),
            format_bytes(disk->total_bytes).c_str()),
       roomy ? "" : "free at least 1 GiB or name another path"});
  if (roomy) examine_speed(path, findings);
}

void examine_stores(const std::string& path, std::vector<Finding>& findings) {
  std::size_t stale = 0;
  std::uint64_t bytes = 0;
  std::string names;
  for (const FoundStore& found : find_stores(path)) {
    if (found.owner != 0 || !precious(found).empty()) continue;
    ++stale;
    bytes += found.bytes;
    if (stale <= 3) names += (names.empty() ? "" : ", ") + found.path;
  }
  if (stale == 0) {
    findings.push_back({"stale stores", Verdict::kOk, "none"});
    return;
  }
  findings.push_back(
      {"stale stores", Verdict::kWarning,
       strf("%zu that no process uses, %s: %s%s", stale,
            format_bytes(bytes).c_str(), names.c_str(),
            stale > 3 ? ", ..." : ""),
       strf("zinf checkpoint inspect DIR shows one, zinf checkpoint prune %s "
            "removes them",
            path.c_str())});
}

// torch's version in the virtual environment of this program, or "".
std::string torch_version() {
  std::error_code error;
  auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  std::vector<std::filesystem::path> prefixes = {
      self.parent_path().parent_path()};
  if (const char* venv = std::getenv("VIRTUAL_ENV"))
    prefixes.emplace_back(venv);
  for (const auto& prefix : prefixes) {
    for (const auto& entry :
         std::filesystem::directory_iterator(prefix / "lib", error)) {
      std::ifstream file(entry.path() / "site-packages/torch/version.py");
      for (std::string line; std::getline(file, line);) {
        if (line.rfind("__version__", 0) != 0) continue;
        std::size_t begin = line.find('\'') + 1;
        return line.substr(begin, line.rfind('\'') - begin);
      }
    }
  }
  return "";
}

void examine_torch(std::vector<Finding>& findings) {
  std::string version = torch_version();
  bool right = version.rfind(kTorchVersion, 0) == 0;
  std::string remedy = "pip install torch==2.13.0 (or make setup)";
  findings.push_back({"torch", right ? Verdict::kOk : Verdict::kFailure,
                      version.empty() ? "not found" : version,
                      right ? "" : remedy});
}

void print_findings(const std::vector<Finding>& findings) {
  bool color = isatty(STDOUT_FILENO) == 1;
  for (const Finding& finding : findings) {
    const char* mark = finding.verdict == Verdict::kOk        ? " ok "
                       : finding.verdict == Verdict::kWarning ? "warn"
                                                              : "FAIL";
    const char* paint = finding.verdict == Verdict::kOk        ? "\033[32m"
                        : finding.verdict == Verdict::kWarning ? "\033[33m"
                                                               : "\033[31m";
    std::printf("%s%s%s  %-13s %s\n", color ? paint : "", mark,
                color ? "\033[0m" : "", finding.name.c_str(),
                finding.value.c_str());
    if (!finding.remedy.empty()) {
      std::printf("      %-13s -> %s\n", "", finding.remedy.c_str());
    }
  }
}

void print_json(const std::vector<Finding>& findings, const std::string& path) {
  bool healthy = true;
  std::vector<JsonObject> list;
  for (const Finding& finding : findings) {
    healthy &= finding.verdict != Verdict::kFailure;
    list.push_back(JsonObject()
                       .add("name", finding.name)
                       .add("verdict", verdict_name(finding.verdict))
                       .add("value", finding.value)
                       .add("remedy", finding.remedy));
  }
  JsonObject json;
  json.add("zinf", version()).add("path", path).add("ok", healthy);
  std::printf("%s\n", json.add("findings", list).text().c_str());
}

}  // namespace

Status run_doctor(const DoctorArguments& args) {
  std::vector<Finding> findings;
  // What the measurements would warn of is a finding of its own.
  set_log_level(std::max(log_level(), LogLevel::kError));
  Machine machine = inspect_machine();
  examine_machine(machine, findings);
  examine_uring(machine, findings);
  examine_disk(args.path, findings);
  examine_stores(args.path, findings);
  examine_torch(findings);
  std::string failures;
  for (const Finding& finding : findings) {
    if (finding.verdict != Verdict::kFailure) continue;
    failures += (failures.empty() ? "" : ", ") + finding.name;
  }
  if (args.json) {
    print_json(findings, args.path);
  } else {
    print_findings(findings);
  }
  if (failures.empty()) return {};
  return Status::error(Code::kUnsupported,
                       "training would fail here: " + failures);
}

}  // namespace zinf::cli
