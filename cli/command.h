// The subcommands: what each takes, and the function that runs it. The command
// line is described in arguments.cpp alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "zinf/status.h"
#include "zinf/store.h"

namespace zinf::cli {

struct DoctorArguments {
  std::string path = ".";
  bool json = false;
};
Status run_doctor(const DoctorArguments& args);

struct BenchArguments {
  std::string path;
  std::uint64_t block_bytes = std::uint64_t{1} << 20;
  std::uint64_t size_bytes = std::uint64_t{1} << 30;
  bool size_given = false;
  int depth = 16;
  std::string backend = "auto";
  bool read = false;
  bool write = false;
  bool mix = false;
  bool overwrite = false;
  bool json = false;
};
Status run_bench(const BenchArguments& args);

struct TuneArguments {
  std::string path;
  std::uint64_t size_bytes = std::uint64_t{512} << 20;
  bool json = false;
};
Status run_tune(const TuneArguments& args);

struct CheckpointArguments {
  std::vector<std::string> directories;
  bool json = false;
  bool dry_run = false;
  bool all = false;
};
Status run_inspect(const CheckpointArguments& args);
Status run_verify(const CheckpointArguments& args);
Status run_prune(const CheckpointArguments& args);
// Why a store that nobody uses should stay, or "".
std::string precious(const FoundStore& found);

struct PlanArguments {
  std::string model = {};  // a path; else the sizes
  std::uint64_t layers = 0;
  std::uint64_t hidden = 0;
  std::uint64_t heads = 0;
  std::uint64_t vocab = 0;
  std::uint64_t seq = 0;       // 0: the model's, or 1024
  std::string cluster = {};    // empty: `this`
  std::string path = {};       // `this`: the directory whose disk is measured
  std::string precision = {};  // empty: what the cluster computes well in
  bool no_recompute = false;
  double tokens = 0;
  // Names of zinf/what_if.h and their values.
  std::vector<std::pair<std::string, std::string>> changes = {};
  std::string what_if = {};
  bool paper = false;
  bool beyond = false;
  bool json = false;
};
Status run_plan(const PlanArguments& args);

// What the command line asks for: kInvalid when it makes no sense. Help and
// version are such actions too.
Result<std::function<Status()>> parse_arguments(int argc, char** argv);

}  // namespace zinf::cli
