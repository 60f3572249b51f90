// What the subcommands share. Each adds itself to the application and leaves a
// function that runs it when it was the one chosen.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "zinf/status.h"

namespace zinf::cli {

// The chosen subcommand, filled in while the arguments are parsed.
struct Chosen {
  std::function<Status()> run;
};

void add_doctor(CLI::App& app, Chosen& chosen);
void add_io(CLI::App& app, Chosen& chosen);  // with bench and tune below it
void add_bench(CLI::App& io, Chosen& chosen);
void add_tune(CLI::App& io, Chosen& chosen);

// An option in bytes ("4GB", "512MiB", "4096").
CLI::Option* add_bytes(CLI::App& app, const std::string& name,
                       std::uint64_t& bytes, const std::string& help);

}  // namespace zinf::cli
