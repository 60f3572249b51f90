// zinf: one command for people. Exit code 0: done; 1: it failed; 2: the command
// line makes no sense.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <vector>

#include "cli/command.h"
#include "src/base/strf.h"
#include "src/base/suggest.h"
#include "zinf/bytes.h"
#include "zinf/version.h"

namespace zinf::cli {
namespace {

int exit_code(const Status& status) {
  if (status.ok()) return 0;
  return status.code() == Code::kInvalid ? 2 : 1;
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
    if (word.rfind('-', 0) == 0 || command_names(*app).empty()) continue;
    CLI::App* command = nullptr;
    for (CLI::App* candidate :
         app->get_subcommands([](CLI::App*) { return true; })) {
      if (candidate->get_name() == word) command = candidate;
    }
    if (command == nullptr) {
      return unknown("command", word, command_names(*app));
    }
    app = command;
  }
  return {};
}

int run(int argc, char** argv) {
  CLI::App app("Trains any PyTorch model within the memory that there is.",
               "zinf");
  app.set_version_flag("--version", std::string("zinf ") + version());
  app.require_subcommand(1);
  Chosen chosen;
  add_doctor(app, chosen);
  add_io(app, chosen);

  Status status = check_words(app, argc, argv);
  if (status.ok()) {
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() == 0) return app.exit(error);  // help, version
      status = Status::error(Code::kInvalid, error.what());
    }
  }
  if (status.ok()) status = chosen.run();
  if (!status.ok()) std::fprintf(stderr, "zinf: %s\n", status.text().c_str());
  return exit_code(status);
}

}  // namespace

CLI::Option* add_bytes(CLI::App& app, const std::string& name,
                       std::uint64_t& bytes, const std::string& help) {
  return app
      .add_option_function<std::string>(
          name,
          [&bytes, name](const std::string& text) {
            Result<std::uint64_t> parsed = parse_bytes(text);
            if (!parsed.ok()) {
              throw CLI::ValidationError(name, parsed.status().text());
            }
            bytes = parsed.value();
          },
          help)
      ->type_name("SIZE")
      ->default_str(format_bytes(bytes));
}

}  // namespace zinf::cli

int main(int argc, char** argv) {
  // The last resort: nothing below throws for a reason that a user can cause.
  try {
    return zinf::cli::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "zinf: internal error: %s\n", error.what());
    return 1;
  }
}
