// The command line: every command and option, in one place. (CLI11 takes
// seconds to compile, so no other file includes it.)
#include <CLI/CLI.hpp>
#include <array>
#include <charconv>
#include <memory>
#include <vector>

#include "cli/command.h"
#include "src/base/strf.h"
#include "src/base/suggest.h"
#include "zinf/bytes.h"
#include "zinf/version.h"

namespace zinf::cli {
namespace {

using Action = std::function<Status()>;

constexpr std::uint64_t kMostCount = 1'000'000'000'000'000'000;

// An option in bytes ("4GB", "512MiB", "4096").
CLI::Option* add_bytes(CLI::App& app, const std::string& name,
                       std::uint64_t& bytes, const std::string& help) {
  auto parse = [&bytes, name](const std::string& text) {
    Result<std::uint64_t> parsed = parse_bytes(text);
    if (!parsed.ok()) {
      throw CLI::ValidationError(name, parsed.status().text());
    }
    bytes = parsed.value();
  };
  return app.add_option_function<std::string>(name, parse, help)
      ->type_name("SIZE")
      ->default_str(format_bytes(bytes));
}

// A whole number; CLI11 would say neither what it read nor what it wants.
void add_count(CLI::App& app, const std::string& name, std::uint64_t& count,
               const std::string& help) {
  auto parse = [&count, name](const std::string& text) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, count);
    if (error == std::errc() && stop == end && count <= kMostCount) return;
    throw CLI::ValidationError(
        name, "\"" + text + "\" must be a whole number from 0 to 10^18");
  };
  app.add_option_function<std::string>(name, parse, help)->type_name("COUNT");
}

void add_doctor(CLI::App& root, Action& action) {
  CLI::App* app = root.add_subcommand(
      "doctor", "Would training work here: CPU, memory, disk, io_uring, torch");
  auto args = std::make_shared<DoctorArguments>();
  app->add_option("path", args->path, "A directory for offloaded state")
      ->capture_default_str()
      ->type_name("PATH");
  app->add_flag("--json", args->json, "Print one JSON object");
  app->callback(
      [args, &action] { action = [args] { return run_doctor(*args); }; });
}

void add_bench(CLI::App& io, Action& action) {
  CLI::App* app = io.add_subcommand("bench", "How fast a path is");
  auto args = std::make_shared<BenchArguments>();
  app->add_option("path", args->path, "A directory on the disk to measure")
      ->required()
      ->type_name("PATH");
  add_bytes(*app, "--block", args->block_bytes,
            "Size of one transfer: a multiple of 4 KiB, up to 1 GiB");
  app->add_option("--depth", args->depth, "Transfers in flight: 1 to 4096")
      ->capture_default_str();
  CLI::Option* size =
      add_bytes(*app, "--size", args->size_bytes, "Size of the file");
  app->add_flag("--read", args->read, "Measure reading");
  app->add_flag("--write", args->write, "Measure writing");
  app->add_flag("--mix", args->mix, "Measure both directions at once");
  app->add_option("--backend", args->backend, "auto, io_uring or threads")
      ->capture_default_str();
  app->add_flag(
      "--overwrite", args->overwrite,
      "PATH is a file: it is overwritten whole, also to measure reading");
  app->add_flag("--json", args->json, "Print one JSON object");
  app->callback([args, size, &action] {
    args->size_given = size->count() > 0;
    action = [args] { return run_bench(*args); };
  });
}

void add_tune(CLI::App& io, Action& action) {
  CLI::App* app = io.add_subcommand(
      "tune",
      "Find block size and depth for a directory and keep them in its "
      "zinf-io.json");
  auto args = std::make_shared<TuneArguments>();
  app->add_option("path", args->path, "The directory")
      ->required()
      ->type_name("PATH");
  add_bytes(*app, "--size", args->size_bytes, "Size of the file to measure on");
  app->add_flag("--json", args->json, "Print one JSON object");
  app->callback(
      [args, &action] { action = [args] { return run_tune(*args); }; });
}

using CheckpointRun = Status (*)(const CheckpointArguments&);

CLI::App* add_checkpoint_command(
    CLI::App& parent, Action& action, const char* name, const char* help,
    const std::shared_ptr<CheckpointArguments>& args, CheckpointRun run) {
  CLI::App* app = parent.add_subcommand(name, help);
  app->add_option("directory", args->directories,
                  "A store (all of its directories when it has several "
                  "paths), or a folder with stores in it")
      ->required()
      ->type_name("DIR");
  app->callback(
      [args, run, &action] { action = [args, run] { return run(*args); }; });
  return app;
}

void add_checkpoint(CLI::App& root, Action& action) {
  CLI::App* parent = root.add_subcommand(
      "checkpoint", "Look into, verify and remove stores of training state");
  parent->require_subcommand(1);
  auto args = std::make_shared<CheckpointArguments>();
  add_checkpoint_command(*parent, action, "inspect",
                         "Versions, steps, states, sizes", args, run_inspect)
      ->add_flag("--json", args->json, "Print one JSON object");
  add_checkpoint_command(*parent, action, "verify",
                         "Read everything, compare all checksums", args,
                         run_verify);
  CLI::App* prune = add_checkpoint_command(
      *parent, action, "prune", "Remove stores below DIR that no process uses",
      args, run_prune);
  prune->add_flag("--dry-run", args->dry_run, "Only say what would be removed");
  prune->add_flag("--all", args->all,
                  "Also those that hold kept versions or cannot be read");
}

// What a plan takes of the names in zinf/what_if.h.
constexpr std::array<std::array<const char*, 3>, 13> kPlanChanges = {
    {{"--nodes", "nodes", "How many nodes"},
     {"--devices-per-node", "devices_per_node", "Devices of a node"},
     {"--batch", "batch", "Samples per device and step (1)"},
     {"--micro-batches", "micro_batches",
      "Parts of it (the quickest power of two)"},
     {"--tiles", "tiles", "Parts in which the largest operators run (1)"},
     {"--device-memory", "device_memory", "Budget of a device"},
     {"--host-memory", "host_memory", "Budget of a process"},
     {"--nvme-bytes", "nvme_bytes", "Space of a process; 0: no NVMe"},
     {"--activation-bytes", "activation_bytes",
      "With --no-recompute: of a step's batch, measured"},
     {"--network-rate", "network_rate", "Between nodes, such as 25GB/s"},
     {"--achieved", "achieved", "Share of the peak that a step reaches (0.4)"},
     {"--peak-flops", "peak_flops", "Of a device, dense"},
     {"--price", "price", "Of a device and hour, in your currency"}}};

void add_plan_model(CLI::App& app, PlanArguments& args) {
  app.add_option("model", args.model,
                 "A config.json, a folder with one, or a .safetensors file")
      ->type_name("PATH");
  add_count(app, "--layers", args.layers, "Instead of a model: its blocks");
  add_count(app, "--hidden", args.hidden, "Its hidden size");
  add_count(app, "--heads", args.heads,
            "Its attention heads (of 64 each); of a model that says none, too");
  add_count(app, "--vocab", args.vocab, "Its vocabulary (0: not counted)");
  add_count(app, "--seq", args.seq,
            "Tokens of a sample (the model's, or 1024)");
}

void add_plan(CLI::App& root, Action& action) {
  CLI::App* app = root.add_subcommand(
      "plan", "What fits, where it goes and how fast it trains, beforehand");
  auto args = std::make_shared<PlanArguments>();
  add_plan_model(*app, *args);
  app->add_option("--cluster", args->cluster,
                  "dgx2-v100, dgx-a100, dgx-h100, gh200, rtx4090-workstation, "
                  "a JSON file, or this: this machine, measured now")
      ->default_str("this");
  app->add_option("--path", args->path,
                  "With --cluster this: a directory on the disk to measure")
      ->default_str(".")
      ->type_name("PATH");
  for (const auto& [option, name, help] : kPlanChanges) {
    auto change = [args, key = name](const std::string& value) {
      args->changes.emplace_back(key, value);
    };
    app->add_option_function<std::string>(option, change, help)
        ->type_name("VALUE");
  }
  app->add_option("--precision", args->precision,
                  "bf16, bf16-split (masters in 16 bits more) or fp32");
  app->add_flag("--no-recompute", args->no_recompute,
                "Keep all activations for backward");
  app->add_option("--tokens", args->tokens, "Train for so many: time and cost");
  app->add_option("--what-if", args->what_if,
                  "A sweep, such as device_memory=24GB,80GB");
  app->add_flag("--paper", args->paper,
                "The papers' tables and figures beside ours");
  app->add_flag("--beyond", args->beyond, "What the papers did not study");
  app->add_flag("--json", args->json, "Print one JSON object");
  app->callback(
      [args, &action] { action = [args] { return run_plan(*args); }; });
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      names.push_back("--" + name);
    }
  }
  return names;
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command :
       app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

Status unknown(const char* what, const std::string& word,
               const std::vector<std::string>& known) {
  std::string near = nearest_name(word, known);
  std::string all;
  for (const std::string& name : known) all += (all.empty() ? "" : ", ") + name;
  std::string hint = near.empty() ? strf("known are %s", all.c_str())
                                  : strf("did you mean %s?", near.c_str());
  return Status::error(Code::kInvalid, strf("unknown %s %s: %s", what,
                                            word.c_str(), hint.c_str()));
}

// Finds the first word that no command knows: CLI11 only says that it was not
// expected.
Status check_words(CLI::App& root, int argc, char** argv) {
  CLI::App* app = &root;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word == "--") break;
    if (word.rfind("--", 0) == 0) {
      std::string name = word.substr(0, word.find('='));
      if (app->get_option_no_throw(name) == nullptr) {
        return unknown("option", name, option_names(*app));
      }
      continue;
    }
    // CLI11 takes it for an option, and its value for missing.
    const bool negative = word.size() > 1 && word[0] == '-' && word[1] != '-';
    if (negative && word.find_first_not_of("0123456789.", 1) == word.npos) {
      return Status::error(Code::kInvalid, strf("%s %s: it cannot be negative",
                                                argv[i - 1], word.c_str()));
    }
    std::vector<std::string> names = command_names(*app);
    if (word.rfind('-', 0) == 0 || names.empty()) continue;
    if (std::find(names.begin(), names.end(), word) == names.end()) {
      return unknown("command", word, names);
    }
    app = app->get_subcommand(word);
  }
  return {};
}

}  // namespace

Result<std::function<Status()>> parse_arguments(int argc, char** argv) {
  CLI::App root("Trains any PyTorch model within the memory that there is.",
                "zinf");
  root.set_version_flag("--version", std::string("zinf ") + version());
  root.require_subcommand(1);
  root.footer(
      "Sizes are written 4096, 512MiB or 4GB. Exit code: 0 done, 1 failed, 2 "
      "wrong usage.\nZINF_LOG=info shows what is chosen and why.");
  Action action;
  add_checkpoint(root, action);
  add_doctor(root, action);
  CLI::App* io = root.add_subcommand("io", "Measure and tune a disk");
  io->require_subcommand(1);
  add_bench(*io, action);
  add_tune(*io, action);
  add_plan(root, action);

  ZINF_TRY(check_words(root, argc, argv));
  try {
    root.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) {
      return Status::error(Code::kInvalid,
                           strf("%s (zinf --help shows more)", error.what()));
    }
    root.exit(error);  // prints the help or the version
    action = [] { return Status(); };
  }
  return action;
}

}  // namespace zinf::cli
